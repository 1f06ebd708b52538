"""Figures of task scores: by length, by depth, and by both."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_modules.tasks.evaluation.summary import RULER_THRESHOLD, Matrix, Score, Summary
from lightning_modules.visualization.images import STYLE

_COLUMNS = 4


@matplotlib.rc_context(STYLE)
def figures(summary: Summary) -> dict[str, Figure]:
    """Draw the figures that have data, by name: ``lengths``, ``heat_map``, ``heat_maps``, ``depths``."""
    found: dict[str, Figure] = {}
    if summary.scores:
        found["lengths"] = score_by_length(summary.scores, summary.averages)
    if summary.heat_maps:
        name, matrix = next(iter(summary.heat_maps.items()))
        found["heat_map"] = heat_map(matrix, "all tasks with a depth" if name == "all" else name)
        found["depths"] = position_curves(summary.curves)
    if len(summary.heat_maps) > 1:
        found["heat_maps"] = heat_maps(dict(list(summary.heat_maps.items())[1:]))
    return found


def score_by_length(scores: Mapping[tuple[str, int], Score], averages: Mapping[int, float]) -> Figure:
    """Draw a line for each task, a thick one for their average, and RULER's threshold."""
    tasks = list(dict.fromkeys(task for task, _ in scores))
    figure = Figure(figsize=(7.2, max(3.6, 1.2 + 0.2 * len(tasks))), layout="constrained")
    axis = figure.subplots()
    colours = matplotlib.colormaps["tab20" if len(tasks) > 10 else "tab10"]
    for number, task in enumerate(tasks):
        points = sorted((length, score) for (name, length), score in scores.items() if name == task)
        lengths, means = [length for length, _ in points], [score.mean for _, score in points]
        errors = np.nan_to_num([score.error for _, score in points])
        axis.errorbar(lengths, means, errors, fmt=".-", color=colours(number), lw=1, capsize=2, label=task)
    if len(tasks) > 1:
        axis.plot(list(averages), list(averages.values()), "ko-", lw=2.5, markersize=5, label="average")
    axis.axhline(RULER_THRESHOLD, color="grey", ls=":", lw=1, label=f"RULER's threshold, {RULER_THRESHOLD}")
    ticks = sorted({length for _, length in scores})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [short(length) for length in ticks])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="length (tokens)", ylabel="score (%)", ylim=(-3, 103))
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def heat_map(matrix: Matrix, title: str) -> Figure:
    """Draw length by depth, with the score in each cell."""
    rows, columns = len(matrix.depths), len(matrix.lengths)
    figure = Figure(figsize=(max(3.4, 1.9 + 0.62 * columns), 1.2 + 0.29 * rows), layout="constrained")
    axis = figure.subplots()
    image = _draw_cells(axis, matrix, numbers=True)
    axis.set(title=title, xlabel="length (tokens)", ylabel="depth of the answer (%)")
    figure.colorbar(image, ax=axis, label="score (%)", shrink=0.9)
    return figure


def heat_maps(matrices: Mapping[str, Matrix]) -> Figure:
    """Draw a small heat map for each task."""
    columns = min(_COLUMNS, len(matrices))
    rows = -(-len(matrices) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.8, 2.4 * rows + 0.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axis, (task, matrix) in zip(axes.flat, matrices.items(), strict=False):
        image = _draw_cells(axis, matrix, numbers=False)
        axis.set_title(task, fontsize=8)
    for axis in axes.flat[len(matrices) :]:
        axis.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=axes, label="score (%)", shrink=0.7)
    figure.supxlabel("length (tokens)", fontsize=8)
    figure.supylabel("depth of the answer (%)", fontsize=8)
    return figure


def position_curves(curves: Mapping[int, Mapping[float, Score]]) -> Figure:
    """Score by depth with its standard error, a line for each length: a U where the middle is lost."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    shades = matplotlib.colormaps["viridis"](np.linspace(0.9, 0, max(2, len(curves))))
    for shade, (length, curve) in zip(shades[-len(curves) :], curves.items(), strict=True):
        depths = 100 * np.array(list(curve))
        means = np.array([score.mean for score in curve.values()])
        errors = np.nan_to_num([score.error for score in curve.values()])
        axis.plot(depths, means, "o-", color=shade, markersize=4, label=short(length))
        axis.fill_between(depths, means - errors, means + errors, color=shade, alpha=0.15, lw=0)
    axis.set(xlabel="depth of the answer (%): 0 front, 100 end", ylabel="score (%)", ylim=(-3, 103))
    figure.legend(title="tokens", loc="outside right upper", fontsize=7, frameon=False)
    return figure


def short(length: int) -> str:
    """Abbreviate a number of tokens: 4k for 4096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _draw_cells(axis: Axes, matrix: Matrix, *, numbers: bool) -> Any:
    cells = matrix.scores.T
    image = axis.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axis.set_facecolor("#ddd")  # what was not measured
    every = max(1, len(matrix.depths) // 10) if numbers else max(1, len(matrix.depths) // 5)
    places = range(0, len(matrix.depths), every)
    axis.set_yticks(places, [f"{100 * matrix.depths[place]:.0f}" for place in places], fontsize=7)
    axis.set_xticks(range(len(matrix.lengths)), [short(length) for length in matrix.lengths], fontsize=7)
    if numbers:
        for (row, column), score in np.ndenumerate(cells):
            if not np.isnan(score):
                colour = "black" if score > 60 else "white"
                axis.text(column, row, f"{score:.0f}", ha="center", va="center", color=colour, fontsize=7)
    return image
