"""Statistics of a document's long-range dependence, from the log-likelihoods of its tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_modules.functional import key_token_mask
from lightning_modules.scoring.key_tokens import Tokens, find_key_tokens, measure_coverage
from lightning_modules.scoring.token_scores import TokenScores

PERCENTILES = (10, 25, 75, 90, 99)
THIRDS = (1, 2, 3)
RUNG_STATISTICS = ("mean", "key_token_ratio", "positive", "p90")
WHOLE = "whole"
"""The whole document's context, in names of columns."""

COLUMNS: dict[str, type] = {
    "tokens": int,
    "scored_tokens": int,
    "compared_tokens": int,
    "key_tokens": int,
    "key_token_ratio": float,
    "tokens_sharing_characters": float,
    "tokens_without_characters": float,
    "longppl": float,
    "perplexity": float,
    "benefit_mean": float,
    "benefit_median": float,
    "benefit_std": float,
    **{f"benefit_p{percentile}": float for percentile in PERCENTILES},
    "benefit_positive": float,
    "benefit_soft": float,
    **{f"benefit_third_{third}": float for third in THIRDS},
}
"""Names and types of what `document_scores` gives."""


def document_scores(
    scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0, gamma: float = 5.0
) -> dict[str, int | float | None]:
    r"""One row of a table of documents.

    The context benefit of a token is its long-short difference, Equation 2 of Fang et al. (2025),
    https://arxiv.org/abs/2410.23771. It is that of the tokens from ``context_length + stride`` on: those before them
    see the same tokens in their short context as in the long one, so that their difference of 0 has no meaning.

    Args:
        scores: Long and short log-likelihoods of the document's tokens.
        alpha: A key token's long-short difference exceeds it, in nats.
        beta: A key token's long log-likelihood exceeds it, in nats.
        gamma: Largest weight of the soft-weighted benefit.

    Returns:
        Values by the names in `COLUMNS`, None for what the document is too short for, sums in float64:

        - ``tokens``, ``scored_tokens`` (all but the first), ``compared_tokens`` (with a short context), ``key_tokens``;
        - ``key_token_ratio``: key tokens among the compared ones;
        - ``tokens_sharing_characters``, ``tokens_without_characters``: shares of the tokens; they matter only to
          evaluated models with another tokenizer;
        - ``longppl``: exponential of the mean negative long log-likelihood of the key tokens (Equation 4, the model
          being its own evaluator), None without any; ``perplexity``: the same of all scored tokens;
        - ``benefit_mean``, ``_median``, ``_std``, ``_p10`` .. ``_p99`` (percentiles, linear between tokens), in nats;
        - ``benefit_positive``: share of the compared tokens with a benefit above 0;
        - ``benefit_soft``: mean benefit weighted by the soft influence ``min(exp(benefit), gamma)`` (Equation 7);
        - ``benefit_third_1`` .. ``_3``: mean benefit of the compared tokens in each third of the document's tokens.

    Raises:
        ValueError: If a threshold makes no sense, or short log-likelihoods are not known.
    """
    key = find_key_tokens(scores, alpha=alpha, beta=beta).mask.numpy()
    weight = scores.soft_influence(gamma=gamma).double().numpy()
    long, short = scores.long.double().numpy(), scores.short.double().numpy()
    tokens, start = len(long), scores.context_length + scores.stride
    values: dict[str, int | float | None] = dict.fromkeys(COLUMNS)
    values |= {
        "tokens": tokens,
        "scored_tokens": tokens - 1,
        "compared_tokens": max(tokens - start, 0),
        "key_tokens": int(key.sum()),
        **measure_coverage(Tokens(scores.token_ids, scores.offsets), None, "tokens").shares(),
        "perplexity": _perplexity(long[1:]),
    }
    if tokens > start:
        benefit, thirds = (long - short)[start:], np.arange(start, tokens) * 3 // tokens
        values |= _benefit(benefit, weight[start:])
        values |= {f"benefit_third_{third}": _mean(benefit[thirds == third - 1]) for third in THIRDS}
        values |= {"key_token_ratio": float(key[start:].mean()), "longppl": _perplexity(long[key])}
    return values


def _benefit(benefit: NDArray[np.float64], weight: NDArray[np.float64]) -> dict[str, float]:
    percentiles = np.percentile(benefit, PERCENTILES)
    return {
        "benefit_mean": float(benefit.mean()),
        "benefit_median": float(np.median(benefit)),
        "benefit_std": float(benefit.std()),
        **{f"benefit_p{name}": float(value) for name, value in zip(PERCENTILES, percentiles, strict=True)},
        "benefit_positive": float((benefit > 0).mean()),
        "benefit_soft": float((weight * benefit).sum() / weight.sum()),
    }


def ladder_columns(contexts: Sequence[int]) -> dict[str, type]:
    """Names and types of what `ladder_scores` gives for a ladder of these context lengths."""
    if not contexts:
        return {}
    pairs: list[tuple[int, int | str]] = [*_pairs([*contexts]), (contexts[0], WHOLE)]
    return {_name(*pair, statistic): float for pair in pairs for statistic in RUNG_STATISTICS}


def ladder_scores(
    scores: TokenScores, contexts: Sequence[int], *, alpha: float = 2.0, beta: float = -2.0
) -> dict[str, float | None]:
    """Compute what each longer context adds for the last tokens of the document (`ContextLadder`).

    Returns:
        Values by the names in `ladder_columns`, None for rungs that the document does not have. A pair of context
        lengths is that of the first rung with another, that of a rung with the next, and that of the first with the
        ``whole`` document. ``ladder_<shorter>_<longer>_mean`` is the mean benefit of the longer context in nats,
        ``_key_token_ratio`` the share of tokens that it makes key tokens, ``_positive`` the share with a benefit above
        0, and ``_p90`` the 90th percentile of the benefit.
    """
    values: dict[str, float | None] = dict.fromkeys(ladder_columns(contexts))
    rungs: dict[Any, Any] = dict(scores.rungs)
    if not rungs:
        return values
    first, window = contexts[0], len(scores.rungs[contexts[0]])
    whole: list[tuple[int, int | str]] = []
    if len(scores.long) - window > first:
        rungs[WHOLE], whole = scores.long[-window:], [(first, WHOLE)]
    for shorter, longer in [*_pairs([context for context in contexts if context in rungs]), *whole]:
        key = key_token_mask(rungs[longer], rungs[shorter], alpha=alpha, beta=beta).numpy()
        benefit = (rungs[longer].double() - rungs[shorter].double()).numpy()
        found = (benefit.mean(), key.mean(), (benefit > 0).mean(), np.percentile(benefit, 90))
        names = [_name(shorter, longer, statistic) for statistic in RUNG_STATISTICS]
        values |= dict(zip(names, map(float, found), strict=True))
    return values


def _pairs(contexts: list[int]) -> list[tuple[int, int]]:
    """The first rung with each other, and each with the next."""
    return [*((contexts[0], longer) for longer in contexts[1:]), *pairwise(contexts[1:])]


def _name(shorter: int, longer: int | str, statistic: str) -> str:
    return f"ladder_{shorter}_{longer}_{statistic}"


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _perplexity(log_likelihood: NDArray[np.float64]) -> float | None:
    if not len(log_likelihood):
        return None
    with np.errstate(over="ignore"):  # more than 1.8e308 is infinite
        return float(np.exp(-log_likelihood.mean()))
