"""Scores against perplexities, a point per model with its name."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from matplotlib.transforms import Bbox

from lightning_modules.commands.correlate.pairs import Pair
from lightning_modules.tasks.evaluation.plots import as_svg

_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}
_COLUMNS = 3
_PLACES = [
    (distance * x, distance * y, horizontal, vertical)
    for distance in (5, 12, 20, 30, 42, 56)
    for x, y, horizontal, vertical in (
        (1, 0, "left", "center"),
        (-1, 0, "right", "center"),
        (0, 1, "center", "bottom"),
        (0, -1, "center", "top"),
        (0.8, 0.8, "left", "bottom"),
        (0.8, -0.8, "left", "top"),
        (-0.8, 0.8, "right", "bottom"),
        (-0.8, -0.8, "right", "top"),
    )
]
"""Where a name may stand beside its point, best first: offset in points of print, and alignment."""


def scatter(pairs: Sequence[Pair], values: Mapping[str, Mapping[str, float]], *, log_axis: bool = False) -> str:
    """A score against each perplexity, as SVG.

    Args:
        pairs: Of the same score.
        values: Of the models.
        log_axis: Whether perplexities have a logarithmic axis.
    """
    with matplotlib.rc_context(_STYLE):
        columns = min(_COLUMNS, len(pairs))
        rows = -(-len(pairs) // columns)
        figure = Figure(figsize=(4.6 * columns, 3.8 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis, pair in zip(axes, pairs, strict=False):
            _draw(axis, pair, values, log_axis)
        for axis in list(axes)[len(pairs) :]:
            axis.set_axis_off()
        figure.draw_without_rendering()  # names need to know where points are
        figure.set_layout_engine("none")
        for axis, pair in zip(figure.axes, pairs, strict=False):
            points = [(values[model][pair.metric], values[model][pair.score]) for model in pair.models]
            label_points(axis, points, pair.models)
        return as_svg(figure)


def _draw(axis: Axes, pair: Pair, values: Mapping[str, Mapping[str, float]], log_axis: bool) -> None:
    x = [values[model][pair.metric] for model in pair.models]
    y = [values[model][pair.score] for model in pair.models]
    axis.plot(x, y, "o", color="C0", markersize=5)
    axis.set(xlabel=pair.metric, ylabel=pair.score)
    axis.margins(0.15)
    if log_axis:
        axis.set(xscale="log", xlabel=f"{pair.metric} (log scale)")
        for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            formatter(LogFormatter(minor_thresholds=(2, 0.6)))  # 20 and 100 instead of powers of 10
    title = pair.undefined or f"Pearson {pair.pearson:.2f}, Spearman {pair.spearman:.2f}, {len(x)} models"
    axis.set_title(title, fontsize=8)


def label_points(axis: Axes, points: Sequence[tuple[float, float]], names: Sequence[str]) -> list[Bbox]:
    """Write a name beside each point, where it covers least of other names, of points and of what is outside.

    Args:
        axis: With its final limits and place.
        points: Where the points are, in its data.
        names: One for each.

    Returns:
        Where the names stand, in pixels.
    """
    figure = axis.figure
    renderer = FigureCanvasAgg(figure.get_figure(root=True)).get_renderer()
    pixels = axis.transData.transform(np.array(points)) if points else np.zeros((0, 2))
    markers = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in pixels]
    inside = axis.get_window_extent(renderer)
    placed: list[Bbox] = []
    for point, name in zip(points, names, strict=True):
        best, least = None, np.inf
        for x, y, horizontal, vertical in _PLACES:
            text = axis.annotate(
                name, point, (x, y), textcoords="offset points", ha=horizontal, va=vertical, fontsize=7
            )
            box = text.get_window_extent(renderer)
            covered = sum(_overlap(box, other) for other in (*placed, *markers)) + 2 * _outside(box, inside)
            if covered < least:
                if best is not None:
                    best.remove()
                best, least = text, covered
            else:
                text.remove()
            if least == 0:
                break
        assert best is not None
        placed.append(best.get_window_extent(renderer))
        if np.hypot(*best.xyann) > 10:
            axis.annotate("", point, best.xyann, textcoords="offset points", arrowprops=_LINE)
    return placed


_LINE: Any = {"arrowstyle": "-", "color": "grey", "lw": 0.5, "shrinkA": 0, "shrinkB": 2}
"""From a name that stands apart to its point."""


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else common.width * common.height


def _outside(box: Bbox, whole: Bbox) -> float:
    return box.width * box.height - _overlap(box, whole)
