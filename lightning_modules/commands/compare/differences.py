"""Compare the perplexities of two models over the same documents.

Documents are rows with ``tokens``, ``perplexity``, ``key_tokens`` and ``longppl``, indexed by name.
"""

import math

import numpy as np
import pandas as pd

from lightning_modules.statistics import Interval, weighted_mean_interval

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


def perplexity_ratio(shared: pd.DataFrame, kind: str) -> tuple[float, Interval | None]:
    """Return the ratio of ``longppl`` or ``perplexity`` over all tokens to the baseline's, with its 95% interval.

    The interval is about the choice of documents, not about the noise of training. What makes a document hard for both
    models cancels. Fewer than 5 documents and infinite ratios have no interval.
    """
    counted = shared[shared[TOKENS[kind]] > 0]
    if counted.empty:
        return math.nan, None
    tokens, differences = (
        counted[TOKENS[kind]].to_numpy(),
        (np.log(counted[kind]) - np.log(counted[f"{kind}_baseline"])).to_numpy(),
    )
    value = math.exp(np.average(differences, weights=tokens))
    # A model that has diverged has infinite perplexities.
    interval = weighted_mean_interval(differences, tokens) if 0 < value < math.inf else None
    with np.errstate(over="ignore"):
        return value, interval and (float(np.exp(interval[0])), float(np.exp(interval[1])))
