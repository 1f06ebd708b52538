"""Compare perplexities on the same documents, with intervals over documents."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

MIN_DOCUMENTS = 5
"""Fewer documents have no interval."""


class Ratio(NamedTuple):
    """Ratio of two perplexities with its 95% interval, which is NaN for fewer than `MIN_DOCUMENTS` documents."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return ""
        interval = "(too few documents)" if math.isnan(self.low) else f"[{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f} {interval}"


def corpus_perplexities(documents: pd.DataFrame) -> tuple[float, float]:
    """Return LongPPL and perplexity over all tokens of a table by document; NaN without tokens."""
    longppl, key_tokens, perplexity, tokens = (
        documents[name].to_numpy() for name in ("longppl", "key_tokens", "perplexity", "tokens")
    )
    return _average(longppl, key_tokens), _average(perplexity, tokens)


def shared_documents(documents: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Return the documents with the same name and equal numbers of tokens and key tokens, with both perplexities."""
    both = documents.join(baseline, rsuffix="_baseline", how="inner")
    return both[(both["tokens"] == both["tokens_baseline"]) & (both["key_tokens"] == both["key_tokens_baseline"])]


def perplexity_ratio(
    perplexity: NDArray[np.float64], baseline: NDArray[np.float64], tokens: NDArray[np.float64]
) -> Ratio:
    """Return the ratio of two perplexities over the same documents, with a 95% bootstrap interval over documents.

    Args:
        perplexity: ``[N]`` perplexities of documents. LongPPL is the perplexity of key tokens.
        baseline: The same of another model.
        tokens: ``[N]`` numbers of tokens on which both are defined.

    Returns:
        The ratio of the perplexities over all tokens. A resample takes the same documents for both models, so that
        what makes a document hard for both cancels.

    Example:
        >>> print(perplexity_ratio(np.array([4.0, 9.0]), np.array([8.0, 9.0]), np.array([10, 10])))
        0.707 (too few documents)
    """
    value = _average(perplexity / baseline, tokens)
    counted = tokens > 0
    if counted.sum() < MIN_DOCUMENTS or not math.isfinite(value):
        return Ratio(value)
    tokens, difference = tokens[counted], np.log(perplexity[counted] / baseline[counted])
    drawn = stats.bootstrap(
        (difference * tokens, tokens),
        lambda difference, tokens, axis: np.exp(difference.sum(axis=axis) / tokens.sum(axis=axis)),
        paired=True,
        method="percentile",
        batch=1000,
        random_state=np.random.default_rng(0),
    )
    return Ratio(value, *map(float, drawn.confidence_interval))


def _average(perplexity: NDArray[np.float64], tokens: NDArray[np.float64]) -> float:
    """Return the geometric mean over tokens."""
    counted = tokens > 0
    if not counted.any():
        return math.nan
    return float(np.exp(np.average(np.log(perplexity[counted]), weights=tokens[counted])))
