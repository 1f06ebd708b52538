"""Figure of the scores of a corpus."""

from collections.abc import Mapping
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from lightning_modules.visualization.images import PANEL, STYLE

METRICS = {
    "key_token_ratio": "key-token ratio",
    "benefit_mean": "mean LSD, nats",
    "tokens": "length, tokens",
    "perplexity": "perplexity",
}
"""Columns of scores that have a histogram, with their labels."""

_LOGARITHMIC = ("tokens", "perplexity")
_BINS = 40


def draw_corpus(scores: Mapping[str, NDArray[np.float64]], stream: BinaryIO, kind: str) -> None:
    """Draw histograms of the `METRICS` that documents have, and save them as an ``svg``, ``png`` or ``pdf`` file."""
    metrics = [name for name in METRICS if name in scores]
    settings: Any = STYLE
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(PANEL[0] * max(len(metrics), 1), PANEL[1]), layout="constrained")
        for plot, name in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            values = np.asarray(scores[name], dtype=np.float64)
            values = values[np.isfinite(values)]
            log = name in _LOGARITHMIC and len(values) > 0 and values.min() > 0
            if log:
                edges = np.geomspace(values.min(), values.max() * 1.001, _BINS + 1)
                plot.set_xscale("log")
            else:
                edges = np.histogram_bin_edges(values, _BINS)
            plot.hist(values, edges)
            plot.set(xlabel=METRICS[name], ylabel="documents")
            plot.yaxis.set_major_locator(MaxNLocator(integer=True))
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(stream, format=kind, metadata=metadata)
