"""Draw curves of runs over each other."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_modules.commands.compare.differences import corpus_perplexities
from lightning_modules.commands.compare.runs import Run
from lightning_modules.visualization.images import STYLE, as_svg

AXES = {"optimizer steps": "", "tokens": "train/tokens", "GPU hours": "train/gpu_hours"}
"""Horizontal axes, each with the scalar that a run logs for it."""

_POINTS = 200  # longer curves are averaged
_LOOKS = ("-", "--", "-.", ":")


def draw_curves(runs: Sequence[Run], axis: str) -> dict[str, str]:
    """Return figures as SVG by title: LongPPL, perplexity, loss and learning rate of the runs that logged the axis."""
    scalar = AXES[axis]
    found = {run.name: _find_curves(run) for run in runs if not scalar or scalar in run.scalars}
    titles = dict.fromkeys(title for curves in found.values() for title in curves)
    figures = {}
    for title in titles:
        curves = {}
        for run in runs:
            points = np.array(sorted(found.get(run.name, {}).get(title, {}).items()), dtype=float).reshape(-1, 2)
            if scalar and len(points):  # which is 0 before the first step
                steps, values = zip((0, 0.0), *sorted(run.scalars[scalar].items()), strict=True)
                points[:, 0] = np.interp(points[:, 0], steps, values)
            curves[run.name] = points[np.isfinite(points[:, 1])]
        if any(map(len, curves.values())):
            figures[title] = _draw_panel(curves, axis, title.partition(":")[0])
    return figures


def _find_curves(run: Run) -> dict[str, Mapping[int, float]]:
    """Return the values of each quantity by optimizer step."""
    longppl, perplexity = {}, {}
    for cell, evaluations in run.evaluations.items():
        numbers = {step: corpus_perplexities(documents) for step, documents in evaluations.items()}
        longppl[f"LongPPL: {', '.join(filter(None, cell))}"] = {step: each[0] for step, each in numbers.items()}
        perplexity[f"Perplexity: {cell.set}"] = {step: each[1] for step, each in numbers.items()}
    rates = {f"Learning rate: {key[3:]}": values for key, values in run.scalars.items() if key.startswith("lr-")}
    return {**longppl, **perplexity, "Training loss (nats)": run.scalars.get("train/loss", {}), **rates}


def _draw_panel(curves: Mapping[str, NDArray[np.float64]], axis: str, quantity: str) -> str:
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
        figure = Figure(figsize=(3.5, 2.7), layout="constrained", facecolor="none")
        plot = figure.subplots()
        plot.set_facecolor("none")
        for (name, points), look in zip(curves.items(), cycle(_LOOKS), strict=False):
            thinned = np.array([part.mean(axis=0) for part in np.array_split(points, min(_POINTS, len(points)) or 1)])
            plot.plot(*thinned.T, look, marker="o" if len(thinned) < 30 else "", markersize=3, label=name)
        plot.set(xlabel=axis, ylabel=quantity)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
        return as_svg(figure)
