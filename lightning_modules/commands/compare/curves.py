"""Draw curves of runs over each other."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_modules.commands.compare.runs import AXES, Run
from lightning_modules.statistics import corpus_perplexity
from lightning_modules.visualization.images import STYLE, as_svg

_POINTS = 200  # longer curves are averaged


def draw_curves(runs: Sequence[Run], axis: str) -> dict[str, str]:
    """Return figures as SVG by title: LongPPL, perplexity, loss and learning rate of the runs that logged the axis."""
    curves = {run.name: _find_curves(run) if AXES[axis] in run.scalars else {} for run in runs}
    figures = {}
    for title in dict.fromkeys(title for own in curves.values() for title in own):
        placed = {
            run.name: place_points(curves[run.name].get(title, {}), run.scalars.get(AXES[axis], {})) for run in runs
        }
        if any(map(len, placed.values())):
            figures[title] = _draw_panel(placed, axis, title.partition(":")[0])
    return figures


def _find_curves(run: Run) -> dict[str, Mapping[int, float]]:
    """Return the values of each quantity by optimizer step."""
    curves: dict[str, Mapping[int, float]] = {}
    for kind, name in (("longppl", "LongPPL"), ("perplexity", "Perplexity")):
        for cell, steps in sorted(run.evaluations.items(), key=lambda each: each[0]):
            title = f"{name}: {cell if kind == 'longppl' else cell.partition(',')[0]}"
            curves[title] = {step: corpus_perplexity(documents, kind) for step, documents in steps.items()}
    rates = {f"Learning rate: {key[3:]}": values for key, values in run.scalars.items() if key.startswith("lr-")}
    return {**curves, "Training loss (nats)": run.scalars.get("train/loss", {}), **rates}


def place_points(curve: Mapping[int, float], axis: Mapping[int, float]) -> NDArray[np.float64]:
    """Return ``[N, 2]`` points of a curve by optimizer step over an axis, which is 0 before the first step."""
    points = np.array(sorted(curve.items()), dtype=np.float64).reshape(-1, 2)
    steps, values = zip((0, 0.0), *sorted(axis.items()), strict=True)
    points[:, 0] = np.interp(points[:, 0], steps, values)
    points = points[np.isfinite(points[:, 1])]
    return np.array([part.mean(axis=0) for part in np.array_split(points, _POINTS) if len(part)]).reshape(-1, 2)


def _draw_panel(curves: Mapping[str, NDArray[np.float64]], axis: str, quantity: str) -> str:
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
        figure = Figure(figsize=(3.3, 2.6), layout="constrained", facecolor="none")
        plot = figure.subplots()
        plot.set(xlabel=axis, ylabel=quantity, facecolor="none")
        plot.locator_params("x", nbins=5)
        for (name, points), line in zip(curves.items(), cycle(("-", "--", "-.", ":")), strict=False):
            plot.plot(*points.T, line, marker="o" if len(points) < 30 else "", markersize=3, label=name)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
        return as_svg(figure)
