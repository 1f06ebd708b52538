"""Draw the figures of the report as SVG."""

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter

from lightning_modules.functional import PowerLaw
from lightning_modules.visualization.images import PANEL, STYLE, as_svg

_MARKERS = {"trained": "o", "extended": "x"}


@matplotlib.rc_context(STYLE)
def figures(experiments: dict[str, Any]) -> dict[str, str]:
    """Return the SVG of each figure by name, for the experiments that were run."""
    makers = {"A": _correlations, "B": _objectives, "E": _contexts}
    return {
        name: as_svg(figure)
        for letter, maker in makers.items()
        if letter in experiments
        for name, figure in maker(experiments[letter])
    }


def _panel(legend_rows: int, **labels: Any) -> tuple[Figure, Axes]:
    width, height = PANEL
    figure = Figure(figsize=(width, height + 0.17 * legend_rows), layout="constrained")
    axis = figure.subplots()
    axis.set(**labels)
    return figure, axis


def _add_legend(figure: Figure, columns: int = 2) -> Figure:
    figure.legend(loc="outside lower left", ncols=columns, fontsize=7)
    return figure


def _correlations(experiment: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Draw accuracy against PPL and LongPPL, a point per model; those of the first base seed are named."""
    colors = {name: f"C{index}" for index, name in enumerate(_groups(experiment))}
    for metric, title in (("perplexity", "PPL"), ("longppl", "LongPPL")):
        figure, axis = _panel(3, xscale="log", xlabel=f"{title} (log scale)", ylabel="share of right answers")
        axis.set_ylim(-0.03, 1.03)
        for number, seed in enumerate(experiment["seeds"]):
            for model in seed["models"]:
                x, y = model[metric], model["accuracy"]
                marker, color = _MARKERS[model["group"]], colors[_group(model)]
                axis.plot(x, y, marker, color=color, alpha=1.0 if number == 0 else 0.4, markersize=5)
                if number == 0 and model["group"] == "trained":
                    rows = model["name"].rpartition(" ")[2]
                    axis.annotate(rows, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
        _plain_ticks(axis)
        for name, color in colors.items():
            axis.plot([], [], "s", color=color, label=name)
        for name, marker in _MARKERS.items():
            axis.plot([], [], marker, color="grey", label=name)
        yield f"correlation-{metric}", _add_legend(figure)


def _plain_ticks(axis: Axes) -> None:
    """Label ticks as 20 and 100, not as powers of 10."""
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(2, 0.6)))


def _groups(experiment: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_group(model) for seed in experiment["seeds"] for model in seed["models"]))


def _group(model: dict[str, Any]) -> str:
    return str(model["name"]).partition(",")[0]


def _objectives(experiment: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Draw accuracy by step and by CPU time; thin lines are runs, thick ones their mean by step."""
    for key, label in (("step", "optimizer steps"), ("cpu_seconds", "CPU time of training (s)")):
        figure, axis = _panel(1, xlabel=label, ylabel="share of right answers")
        for name, color in (("CE", "C0"), ("LongCE", "C1")):
            curves = [pair["curves"][name] for pair in experiment["pairs"]]
            for curve in curves:
                axis.plot([e[key] for e in curve], [e["accuracy"] for e in curve], color=color, alpha=0.25, lw=0.8)
            x = np.mean([[e[key] for e in curve] for curve in curves], axis=0)
            y = np.mean([[e["accuracy"] for e in curve] for curve in curves], axis=0)
            axis.plot(x, y, "o-", color=color, label=f"{name}, mean of {len(curves)}", lw=2, markersize=4)
        yield f"objectives-{key}", _add_legend(figure)


def _contexts(experiment: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Draw the loss of the same tokens by context, with the power laws of the evaluator and the models of a seed."""
    contexts = np.array(experiment["contexts"])
    smooth = np.geomspace(contexts[0], contexts[-1], 100)
    first = [
        model for model in experiment["models"] if model["name"] == "evaluator" or model["name"].startswith("seed0")
    ]
    change = f"loss, less that at {contexts[0]} tokens (nats)"
    figure, axis = _panel(len(first) // 2 + 1, xscale="log", xlabel="context (tokens)", ylabel=change)
    for index, model in enumerate(first):
        losses = np.array(model["loss"]) - model["loss"][0]
        axis.plot(contexts, losses, "osD^v"[index // 10 % 5], color=f"C{index % 10}", markersize=3, label=model["name"])
        if model["fit"] is not None:
            fitted = PowerLaw(**model["fit"])(torch.from_numpy(smooth)).numpy()
            axis.plot(smooth, fitted - model["loss"][0], color=f"C{index % 10}", lw=0.9)
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.xaxis.set_minor_formatter(NullFormatter())
    yield "contexts", _add_legend(figure)
