"""Statistics of the scores of a corpus, by source."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

BINS = 40
OTHERS = "other sources"
_STEPS = 200  # of a slider
_DIGITS = 4  # significant digits of a threshold
_TAIL = 0.005  # fraction of the documents in the outermost bins of a histogram, which have no other bounds

Thresholds = list[tuple[float, int, int]]
"""Ascending thresholds, with the number of documents above each and their tokens."""


def join_small_sources(sources: pd.Series, max_sources: int = 6) -> pd.Series:
    """Return the sources of documents, in which those with the fewest documents are joined as `OTHERS`."""
    counts = sources.groupby(sources).size().sort_values(ascending=False, kind="stable")
    return sources.where(sources.isin(counts.index[:max_sources]), OTHERS)


def totals(documents: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return documents, tokens, and the means of some columns by source, the largest source first."""
    sources = documents.groupby("source")
    found = pd.DataFrame({"documents": sources.size(), "tokens": sources["tokens"].sum()})
    return found.join(sources[list(columns)].mean()).sort_values("documents", ascending=False, kind="stable")


def histogram(
    documents: pd.DataFrame, column: str, *, log: bool = False
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
    """Return ``[BINS + 1]`` edges and the ``[BINS]`` documents of each source; ``log`` makes bins of equal ratio.

    The outermost bins also count the documents beyond them.
    """
    found = documents[np.isfinite(documents[column]) & ((documents[column] > 0) | (not log))]
    low, high = found[column].quantile([0, 1] if log else [_TAIL, 1 - _TAIL]).fillna(1.0)
    high = high if high > low else low + 1
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    values = found[column].clip(edges[0], edges[-1]).groupby(found["source"])
    return edges, {str(source): np.histogram(own, edges)[0] for source, own in values}


def thresholds(documents: pd.DataFrame, column: str) -> Thresholds:
    """Return thresholds of a column, up to its maximum, with the documents and tokens above each."""
    ranked = documents.dropna(subset=column).sort_values(column)
    steps = ranked.loc[np.isfinite(ranked[column]), column].quantile(np.linspace(0, 1, _STEPS + 1))
    # Rounded first: what the slider shows is what a condition with the shown number keeps.
    values = sorted({float(f"{value:.{_DIGITS}g}") for value in steps.dropna()})
    below = np.searchsorted(ranked[column], values, side="right")
    tokens = np.append(0, ranked["tokens"].cumsum())
    counts = zip((len(ranked) - below).tolist(), (tokens[-1] - tokens[below]).tolist(), strict=True)
    return [(value, *pair) for value, pair in zip(values, counts, strict=True)]


def examples(documents: pd.DataFrame, column: str, count: int) -> dict[str, list[dict[str, Any]]]:
    """Return the documents with the largest and the smallest values of a column, and random ones."""
    found = documents[np.isfinite(documents[column])]
    kinds = {
        "Largest": found.nlargest(count, column),
        "Smallest": found.nsmallest(count, column),
        "Random": found.sample(min(count, len(found)), random_state=0),
    }
    return {kind: rows.to_dict("records") for kind, rows in kinds.items()}
