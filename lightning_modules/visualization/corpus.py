"""Figure of the scores of a corpus."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_modules.utilities.files import atomic_file
from lightning_modules.utilities.locks import exclusive
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


def draw_corpus(scores: pd.DataFrame, path: Path) -> None:
    """Draw a histogram of each column, one of `METRICS`, and write it as an ``.svg``, ``.png`` or ``.pdf`` file."""
    settings: Any = STYLE
    with matplotlib.rc_context(settings), exclusive(path), atomic_file(path) as stream:
        figure = Figure(figsize=(PANEL[0] * len(scores.columns), PANEL[1]), layout="constrained")
        for plot, name in zip(figure.subplots(1, len(scores.columns), squeeze=False)[0], scores, strict=True):
            values = scores[name].to_numpy(dtype=np.float64)
            values = values[np.isfinite(values)]
            edges = np.histogram_bin_edges(values, _BINS)
            if name in _LOGARITHMIC and len(values) > 0 and values.min() > 0:
                edges = np.geomspace(values.min(), values.max() * 1.001, _BINS + 1)
                plot.set_xscale("log")
            plot.hist(values, edges)
            plot.set(xlabel=METRICS[name], ylabel="documents")
            plot.yaxis.set_major_locator(MaxNLocator(integer=True))
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(stream, format=path.suffix[1:], metadata=metadata)
