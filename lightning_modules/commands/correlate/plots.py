"""Plot scores against perplexities, with one point per model."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from lightning_modules.commands.correlate.pairs import Pair
from lightning_modules.tasks.evaluation.plots import as_svg

_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}
_COLUMNS = 3
_MARKERS = "osD^v<>pP*Xh"
_COLORS = 10  # of matplotlib's default cycle


def scatter(pairs: Sequence[Pair], values: Mapping[str, Mapping[str, float]], *, log_axis: bool = False) -> str:
    """Plot a score against each perplexity.

    Args:
        pairs: Pairs of the same score.
        values: By model and name.
        log_axis: Whether perplexities have a logarithmic axis.

    Returns:
        SVG, with a legend of the models: names beside the points would cover each other.
    """
    models = list(dict.fromkeys(model for pair in pairs for model in pair.models))
    # Color and marker change together, so that dozens of models differ.
    markers = {
        model: {"color": f"C{number % _COLORS}", "marker": marker}
        for number, (model, marker) in enumerate(zip(models, cycle(_MARKERS), strict=False))
    }
    with matplotlib.rc_context(_STYLE):
        columns = min(_COLUMNS, len(pairs))
        rows = -(-len(pairs) // columns)
        figure = Figure(figsize=(4.6 * columns + 1.5, 3.8 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        handles: dict[str, Any] = {}
        for axis, pair in zip(axes, pairs, strict=False):
            for model in pair.models:
                x, y = values[model][pair.metric], values[model][pair.score]
                (handles[model],) = axis.plot(x, y, linestyle="", markersize=5, **markers[model])
            _label_axis(axis, pair, log_axis)
        for axis in list(axes)[len(pairs) :]:
            axis.set_axis_off()
        figure.legend([handles[model] for model in models], models, loc="outside right upper", fontsize=7)
        return as_svg(figure)


def _label_axis(axis: Axes, pair: Pair, log_axis: bool) -> None:
    axis.set(xlabel=pair.metric, ylabel=pair.score)
    axis.margins(0.15)
    if log_axis:
        axis.set(xscale="log", xlabel=f"{pair.metric} (log scale)")
        for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            formatter(LogFormatter(minor_thresholds=(2, 0.6)))  # 20 and 100 instead of powers of 10
    title = pair.undefined or f"Pearson {pair.pearson:.2f}, Spearman {pair.spearman:.2f}, {len(pair.models)} models"
    axis.set_title(title, fontsize=8)
