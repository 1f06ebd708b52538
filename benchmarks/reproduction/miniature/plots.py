"""Draw the figures of the report as SVG."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullFormatter

from lightning_modules.functional import PowerLaw

_MARKERS = {"trained": "o", "extended": "x"}
_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}


def figures(experiments: dict[str, Any]) -> dict[str, str]:
    """Return the SVG of each figure by name, for the experiments that were run."""
    makers = {
        "correlation": ("A", _correlation),
        "objectives": ("B", _objectives),
        "contexts": ("E", _contexts),
    }
    with matplotlib.rc_context(_STYLE):
        return {
            name: _svg(maker(experiments[letter])) for name, (letter, maker) in makers.items() if letter in experiments
        }


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()


def _axes(columns: int, width: float = 4.6, height: float = 3.4) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def _correlation(experiment: dict[str, Any]) -> Figure:
    """Draw accuracy against PPL and LongPPL, a point per model; those of the first base seed are named."""
    figure, axes = _axes(2, 5.4, 4.2)
    colors = {name: f"C{index}" for index, name in enumerate(_groups(experiment))}
    for axis, metric, title in zip(axes, ("perplexity", "longppl"), ("PPL", "LongPPL"), strict=True):
        for number, seed in enumerate(experiment["seeds"]):
            for model in seed["models"]:
                x, y = model[metric], model["accuracy"]
                marker, color = _MARKERS[model["group"]], colors[_group(model)]
                axis.plot(x, y, marker, color=color, alpha=1.0 if number == 0 else 0.4, markersize=5)
                if number == 0 and model["group"] == "trained":
                    rows = model["name"].rpartition(" ")[2]
                    axis.annotate(rows, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
        axis.set(xscale="log", xlabel=f"{title} (log scale)", ylim=(-0.03, 1.03))
        _plain_ticks(axis)
    axes[0].set_ylabel("share of right answers")
    for name, color in colors.items():
        axes[0].plot([], [], "s", color=color, label=name)
    for name, marker in _MARKERS.items():
        axes[0].plot([], [], marker, color="grey", label=name)
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle("Numbers beside points: tokens per training row; paler points: other base seeds", fontsize=8)
    return figure


def _plain_ticks(axis: Axes) -> None:
    """Label ticks as 20 and 100, not as powers of 10."""
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter(LogFormatter(minor_thresholds=(2, 0.6)))


def _groups(experiment: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(_group(model) for seed in experiment["seeds"] for model in seed["models"]))


def _group(model: dict[str, Any]) -> str:
    return str(model["name"]).partition(",")[0]


def _objectives(experiment: dict[str, Any]) -> Figure:
    """Draw accuracy by step and by CPU time; thin lines are runs, thick ones their mean by step."""
    figure, axes = _axes(2)
    for axis, key, label in zip(
        axes, ("step", "cpu_seconds"), ("optimizer steps", "CPU seconds of training"), strict=True
    ):
        for name, color in (("CE", "C0"), ("LongCE", "C1")):
            curves = [pair["curves"][name] for pair in experiment["pairs"]]
            for curve in curves:
                axis.plot([e[key] for e in curve], [e["accuracy"] for e in curve], color=color, alpha=0.25, lw=0.8)
            x = np.mean([[e[key] for e in curve] for curve in curves], axis=0)
            y = np.mean([[e["accuracy"] for e in curve] for curve in curves], axis=0)
            axis.plot(x, y, "o-", color=color, label=f"{name}, mean of {len(curves)}", lw=2, markersize=4)
        axis.set_xlabel(label)
    axes[0].set_ylabel("share of right answers")
    axes[0].legend(frameon=False)
    return figure


def _contexts(experiment: dict[str, Any]) -> Figure:
    """Draw the loss of the same tokens by context, with the power laws of the evaluator and the models of a seed."""
    figure, (axis,) = _axes(1, 6.4, 4.0)
    contexts = np.array(experiment["contexts"])
    smooth = np.geomspace(contexts[0], contexts[-1], 100)
    first = [
        model for model in experiment["models"] if model["name"] == "evaluator" or model["name"].startswith("seed0")
    ]
    for index, model in enumerate(first):
        losses = np.array(model["loss"]) - model["loss"][0]
        axis.plot(contexts, losses, "o", color=f"C{index}", markersize=3, label=model["name"])
        if model["fit"] is not None:
            fitted = PowerLaw(**model["fit"])(torch.from_numpy(smooth)).numpy()
            axis.plot(smooth, fitted - model["loss"][0], color=f"C{index}", lw=0.9)
    axis.set(xscale="log", xlabel="tokens of context", ylabel=f"loss, less that at {contexts[0]} tokens (nats)")
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.legend(fontsize=6, frameon=False)
    return figure
