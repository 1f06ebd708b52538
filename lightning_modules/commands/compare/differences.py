"""Compare the perplexities of two models over the same documents, with intervals over documents.

Documents are rows with ``tokens``, ``perplexity``, ``key_tokens`` and ``longppl``, indexed by name.
"""

import math

import numpy as np
import pandas as pd
from scipy import stats

MIN_DOCUMENTS = 5
"""Fewer documents have no interval."""

TOKENS = {"longppl": "key_tokens", "perplexity": "tokens"}
"""Numbers of tokens that the perplexities of a document are over."""


def corpus_perplexity(documents: pd.DataFrame, kind: str) -> float:
    """Return ``longppl`` or ``perplexity`` over all (key) tokens of the documents; NaN without tokens."""
    counted = documents[documents[TOKENS[kind]] > 0]
    return math.exp(np.average(np.log(counted[kind]), weights=counted[TOKENS[kind]])) if len(counted) else math.nan


def shared_documents(documents: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Return the documents that both have with equal numbers of tokens and key tokens, with both perplexities."""
    both = documents.merge(baseline, left_index=True, right_index=True, suffixes=("", "_baseline"))
    return both[(both["tokens"] == both["tokens_baseline"]) & (both["key_tokens"] == both["key_tokens_baseline"])]


def perplexity_ratio(shared: pd.DataFrame, kind: str) -> tuple[float, float, float]:
    """Return the ratio of ``longppl`` or ``perplexity`` over all tokens to the baseline's, with a 95% interval.

    The interval is a percentile bootstrap over the shared documents. A resample has the same documents for both models,
    so that what makes a document hard for both cancels. It is NaN for fewer than `MIN_DOCUMENTS` documents.
    """
    counted = shared[shared[TOKENS[kind]] > 0]
    tokens = counted[TOKENS[kind]].to_numpy()
    differences = tokens * np.log(counted[kind] / counted[f"{kind}_baseline"]).to_numpy()
    value = math.exp(differences.sum() / tokens.sum()) if len(tokens) else math.nan
    if len(tokens) < MIN_DOCUMENTS:
        return value, math.nan, math.nan
    drawn = stats.bootstrap(
        (differences, tokens),
        lambda total, count, axis: np.exp(total.sum(axis=axis) / count.sum(axis=axis)),
        paired=True,
        method="percentile",
        batch=1000,
        random_state=np.random.default_rng(0),
    )
    low, high = drawn.confidence_interval
    return value, float(low), float(high)
