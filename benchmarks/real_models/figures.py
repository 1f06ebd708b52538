"""Figures of the page `docs/real.md`, drawn from the raw numbers in `benchmarks/results`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.images import COLORS, INK, LINE, STYLE, as_svg

ROOT = Path(__file__).parents[2]
SHORT_NAMES = {
    "gemma-3-270m": "Gemma 270M",
    "qwen2.5-coder-0.5b": "Qwen 0.5B",
    "qwen2.5-coder-1.5b": "Qwen 1.5B",
    "smollm2-135m": "SmolLM2 135M",
}
WIDTH = 3.6
"""Width of every figure in inches, so that a phone shows its text at full size; panels are stacked."""


@matplotlib.rc_context(STYLE)
def draw_anatomy(numbers: dict[str, Any]) -> str:
    """Draw the shares of key tokens and of all tokens by kind and by history of the word, as SVG text."""
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    plots = figure.subplots(2, 1, sharex=True)
    for plot, aspect, title in zip(plots, ("kinds", "history"), ("part of", "the word was last used"), strict=True):
        evaluators = list(numbers["evaluators"])
        names = list(numbers["evaluators"][evaluators[0]][aspect])
        places = np.arange(len(names))[::-1]
        height = 0.27
        for number, evaluator in enumerate(evaluators):
            found = numbers["evaluators"][evaluator][aspect]
            shares = np.array([100 * found[name]["key"] for name in names])
            ends = 100 * np.array([found[name]["interval"] for name in names])
            errors = np.clip([shares - ends[:, 0], ends[:, 1] - shares], 0, None)
            at, label = places + height * (1 - number), f"key tokens by {SHORT_NAMES.get(evaluator, evaluator)}"
            plot.barh(
                at, shares, height, xerr=errors, color=COLORS[number], label=label, error_kw={"lw": 0.8, "ecolor": INK}
            )
        every = [100 * numbers["evaluators"][evaluators[0]][aspect][name]["all"] for name in names]
        plot.barh(places - height, every, height, color=LINE, edgecolor=COLORS[-1], lw=0.5, label="all tokens")
        plot.set_yticks(places, names)
        plot.grid(axis="y", visible=False)
        plot.set_title(title, loc="left")
    plots[-1].set_xlabel("share, %")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper left")
    return as_svg(figure)


@matplotlib.rc_context(STYLE)
def draw_correlate(numbers: dict[str, Any]) -> str:
    """Draw the accuracy of all systems against perplexity and against LongPPL by each evaluator, as SVG text."""
    systems = numbers["systems"]
    evaluators = [name for name, found in systems[0]["metrics"].items() if isinstance(found, dict)]
    found = numbers["correlations"]["over all"]
    panels = {"perplexity": [each["metrics"]["perplexity"] for each in systems]}
    panels |= {f"{name}: longppl": [each["metrics"][name]["longppl"] for each in systems] for name in evaluators}
    figure = Figure(figsize=(WIDTH, 2.1 * len(panels)), layout="constrained")
    plots = figure.subplots(len(panels), 1)
    models = list(dict.fromkeys(each["model"] for each in systems))
    for plot, (name, values) in zip(plots, panels.items(), strict=True):
        for model, color, marker in zip(models, COLORS, "os^D", strict=False):
            chosen = [index for index, each in enumerate(systems) if each["model"] == model]
            accuracy = [100 * systems[index]["accuracy_all"] for index in chosen]
            label = SHORT_NAMES.get(model, model)
            plot.plot([values[index] for index in chosen], accuracy, marker, color=color, markersize=4, label=label)
        evaluator, _, metric = name.rpartition(": ")
        title = f"LongPPL by {SHORT_NAMES.get(evaluator, evaluator)}" if evaluator else metric
        plot.set(xscale="log", xlabel=title, ylabel="right answers, %")
        plot.set_title(f"Spearman {found[name]['spearman']['value']:.2f}", loc="left")
        label_decades(plot)
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return as_svg(figure)


@matplotlib.rc_context(STYLE)
def draw_extend(numbers: dict[str, Any]) -> str:
    """Draw the ratios of LongPPL and perplexity beyond 8k to those of the model as it is, as SVG text."""
    methods = [name for name in numbers["methods"] if name != "none"]
    places = np.arange(len(methods))[::-1]
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    plot = figure.subplots()
    for kind, label, shift, color in (
        ("longppl", "LongPPL (key tokens)", 0.14, COLORS[0]),
        ("perplexity", "perplexity (all tokens)", -0.14, COLORS[1]),
    ):
        ratios = [numbers["methods"][name]["ranges"]["beyond 8k"][f"{kind} ratio"] for name in methods]
        value, low, high = np.array(
            [[each[0], *(each[0] if end is None else end for end in each[1:])] for each in ratios]
        ).T
        plot.errorbar(value, places + shift, xerr=[value - low, high - value], fmt="o", ms=4, color=color, label=label)
    plot.axvline(1, color=INK, lw=0.8)
    plot.set_yticks(places, methods)
    plot.set(xscale="log", xlabel="ratio to SmolLM2 as it is, beyond 8,192")
    label_decades(plot)
    figure.legend(loc="outside upper left")
    return as_svg(figure)


def label_decades(plot: Axes) -> None:
    """Label a logarithmic x axis of drawn points with plain numbers, the fewer per decade the more decades it has."""
    low, high = plot.get_xlim()
    decades = np.log10(high / low)
    multiples = [1]
    if decades < 2:
        multiples = [1, 3]
    if decades < 1.2:
        multiples = [1, 2, 5]
    plot.xaxis.set(major_locator=LogLocator(subs=multiples), major_formatter="{x:g}", minor_formatter=NullFormatter())


@matplotlib.rc_context(STYLE)
def draw_fine_tune(numbers: dict[str, Any]) -> str:
    """Draw the ratios of each weighting's perplexities to those of cross entropy after equal steps, as SVG text."""
    starts = list(dict.fromkeys(row["start"] for row in numbers["rows"]))
    figure = Figure(figsize=(WIDTH, 2.7 * len(starts)), layout="constrained")
    for plot, start in zip(figure.subplots(len(starts), 1, sharex=True), starts, strict=True):
        rows = [row for row in numbers["rows"] if row["start"] == start and row["budget"] == "steps"][1:]
        places = np.arange(len(rows))[::-1]
        labels = {name: f"LongPPL, {SHORT_NAMES[name]}" for name in rows[0]["ratio"] if name in SHORT_NAMES}
        labels |= {"all": "perplexity", "short": "short perplexity"}
        for number, (kind, label) in enumerate(labels.items()):
            value, low, high = np.array(
                [[row["ratio"][kind]["ratio"], *row["ratio"][kind]["interval"]] for row in rows]
            ).T
            at, errors = places + 0.24 - 0.16 * number, [value - low, high - value]
            plot.errorbar(value, at, xerr=errors, fmt="o", ms=3.5, color=COLORS[number], label=label)
        plot.axvline(1, color=INK, lw=0.8)
        plot.set_yticks(places, [row["weighting"] for row in rows])
        plot.set_title(f"SmolLM2 {start}", loc="left")
    plot.set_xlabel("ratio to cross entropy")
    figure.legend(*plot.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return as_svg(figure)


DRAWN = {
    "anatomy": draw_anatomy,
    "correlate": draw_correlate,
    "extend": draw_extend,
    "fine_tune": draw_fine_tune,
}


def main() -> None:
    """Write the figures of the studies that have been run."""
    for name, draw in DRAWN.items():
        file = ROOT / "benchmarks" / "results" / f"real_{name}.json"
        if file.exists():
            path = ROOT / "docs" / "images" / f"{name}.svg"
            write_atomically(path, draw(json.loads(file.read_text())["numbers"]).encode())
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
