"""Columns of a document's scores: statistics of its long-range dependence."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_modules.functional import key_token_mask
from lightning_modules.scoring.key_tokens import count_coverage, evaluator_key_tokens
from lightning_modules.scoring.token_scores import TokenScores

PERCENTILES = (10, 25, 75, 90, 99)
THIRDS = (1, 2, 3)
LADDER_STATISTICS = ("mean", "key_token_ratio", "positive", "p90")
WHOLE = "whole"
"""Name of the whole document's context in column names."""

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
"""Names and types of the columns of `document_scores`."""


def document_scores(
    scores: TokenScores, *, alpha: float = 2.0, beta: float = -2.0, gamma: float = 5.0
) -> dict[str, int | float | None]:
    r"""Compute the statistics of a document: one row of a table of documents.

    The context benefit of a token is its long-short difference, Equation 2 of Fang et al. (2025),
    https://arxiv.org/abs/2410.23771. It is defined for tokens from index ``context_length + stride`` on. Earlier tokens
    have the same long and short context, so their difference is always 0.

    Returns:
        Values by the names in `COLUMNS`, or None if the document is too short; sums are float64:

        - ``tokens``, ``scored_tokens`` (without the first, and without special tokens), ``compared_tokens`` (with a
          short context), ``key_tokens``;
        - ``key_token_ratio``: fraction of the compared tokens that are key tokens;
        - ``tokens_sharing_characters``, ``tokens_without_characters``: fractions of the tokens; they matter only for
          evaluated models with another tokenizer;
        - ``longppl``: LongPPL with the model as its own evaluator (Equation 4), None without key tokens;
          ``perplexity``: the same over all scored tokens;
        - ``benefit_mean``, ``_median``, ``_std``, ``_p10`` .. ``_p99`` (percentiles, linear between tokens), in nats;
        - ``benefit_positive``: fraction of the compared tokens with a benefit above 0;
        - ``benefit_soft``: mean benefit weighted by the soft influence ``min(exp(benefit), gamma)`` (Equation 7);
        - ``benefit_third_1`` .. ``_3``: mean benefit of the compared tokens in each third of the document's tokens.
    """
    key = evaluator_key_tokens(scores, alpha=alpha, beta=beta).numpy()  # [N] bool
    weight = scores.soft_influence(gamma=gamma).double().numpy()  # [N]
    # Float64, or sums over long documents would lose digits.
    long, short = scores.long.double().numpy(), scores.short.double().numpy()
    tokens, start = len(long), scores.short_context.window_length  # the first token with a short context
    coverage = count_coverage(scores.offsets)
    values: dict[str, int | float | None] = dict.fromkeys(COLUMNS)
    values |= {
        "tokens": tokens,
        "scored_tokens": tokens - scores.unscored,
        "compared_tokens": max(tokens - start, 0),
        "key_tokens": int(key.sum()),
        "tokens_sharing_characters": coverage.sharing / max(coverage.tokens, 1),
        "tokens_without_characters": coverage.without / max(coverage.tokens, 1),
        "perplexity": _compute_perplexity(long[scores.unscored :]),
    }
    if tokens > start:
        # Thirds of all tokens: the first has a mean only if it extends beyond K + d.
        benefit, thirds = (long - short)[start:], np.arange(start, tokens) * 3 // tokens
        values |= _summarize_benefit(benefit, weight[start:])
        values |= {f"benefit_third_{third}": _mean_or_none(benefit[thirds == third - 1]) for third in THIRDS}
        values |= {"key_token_ratio": float(key[start:].mean()), "longppl": _compute_perplexity(long[key])}
    return values


def _summarize_benefit(benefit: NDArray[np.float64], weight: NDArray[np.float64]) -> dict[str, float]:
    percentiles = np.percentile(benefit, PERCENTILES)
    return {
        "benefit_mean": float(benefit.mean()),
        "benefit_median": float(np.median(benefit)),
        "benefit_std": float(benefit.std()),  # of the tokens themselves, not of a sample
        **{f"benefit_p{name}": float(value) for name, value in zip(PERCENTILES, percentiles, strict=True)},
        "benefit_positive": float((benefit > 0).mean()),
        "benefit_soft": float((weight * benefit).sum() / weight.sum()),
    }


def ladder_columns(contexts: Sequence[int]) -> dict[str, type]:
    """Return names and types of the columns of `ladder_scores` for these context lengths."""
    if not contexts:
        return {}
    pairs: list[tuple[int, int | str]] = [*_pair_contexts([*contexts]), (contexts[0], WHOLE)]
    return {_name_column(*pair, statistic): float for pair in pairs for statistic in LADDER_STATISTICS}


def ladder_scores(
    scores: TokenScores, contexts: Sequence[int], *, alpha: float = 2.0, beta: float = -2.0
) -> dict[str, float | None]:
    """Compute the benefit of longer contexts for the last tokens of a document (`ContextLengths`).

    Pairs of context lengths are compared: the first with every other one, each with the next, and the first with the
    ``whole`` document.

    Returns:
        Values by the names in `ladder_columns`, or None for lengths that do not fit into the document.
        ``ladder_<shorter>_<longer>_mean`` is the mean benefit of the longer context in nats, ``_key_token_ratio`` the
        fraction of tokens that it makes key tokens, ``_positive`` the fraction with a benefit above 0, and ``_p90`` the
        90th percentile of the benefit.
    """
    values: dict[str, float | None] = dict.fromkeys(ladder_columns(contexts))
    by_context: dict[Any, Any] = dict(scores.context_scores)
    if not by_context:  # the document is shorter than the first context
        return values
    first, window = contexts[0], len(scores.context_scores[contexts[0]])  # w scored tokens
    whole: list[tuple[int, int | str]] = []
    if len(scores.long) - window > first:  # or the whole document is the first context
        by_context[WHOLE], whole = scores.long[-window:], [(first, WHOLE)]
    for shorter, longer in [*_pair_contexts([context for context in contexts if context in by_context]), *whole]:
        # Equations 2 and 4, with two contexts of any length in place of the long and the short one.
        key = key_token_mask(by_context[longer], by_context[shorter], alpha=alpha, beta=beta).numpy()
        benefit = (by_context[longer].double() - by_context[shorter].double()).numpy()
        statistics = (benefit.mean(), key.mean(), (benefit > 0).mean(), np.percentile(benefit, 90))
        names = [_name_column(shorter, longer, statistic) for statistic in LADDER_STATISTICS]
        values |= dict(zip(names, map(float, statistics), strict=True))
    return values


def _pair_contexts(contexts: list[int]) -> list[tuple[int, int]]:
    """Return pairs of the first context length with each other one, and of each with the next."""
    return [*((contexts[0], longer) for longer in contexts[1:]), *pairwise(contexts[1:])]


def _name_column(shorter: int, longer: int | str, statistic: str) -> str:
    return f"ladder_{shorter}_{longer}_{statistic}"


def _mean_or_none(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _compute_perplexity(log_likelihood: NDArray[np.float64]) -> float | None:
    if not len(log_likelihood):
        return None
    with np.errstate(over="ignore"):  # above 1.8e308 it is inf
        return float(np.exp(-log_likelihood.mean()))
