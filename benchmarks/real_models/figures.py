"""Figures of the page `docs/real.md`, drawn from the raw numbers in `benchmarks/results`."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.images import COLORS, INK, LINE, STYLE, as_svg

ROOT = Path(__file__).parents[2]
SHORT_NAMES = {"gemma-3-270m": "Gemma 270M", "qwen2.5-coder-0.5b": "Qwen 0.5B"}


@matplotlib.rc_context(STYLE)
def draw_anatomy(numbers: dict[str, Any]) -> str:
    """Draw the shares of key tokens and of all tokens by kind and by history of the word, as SVG text."""
    figure = Figure(figsize=(6.8, 2.9), layout="constrained")
    plots = figure.subplots(1, 2, sharex=True)
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
        plot.set_xlabel("share, %")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return as_svg(figure)


def main() -> None:
    """Write the figures of the studies that have been run."""
    for name, draw in (("anatomy", draw_anatomy),):
        file = ROOT / "benchmarks" / "results" / f"real_{name}.json"
        if file.exists():
            path = ROOT / "docs" / "images" / f"{name}.svg"
            write_atomically(path, draw(json.loads(file.read_text())["numbers"]).encode())
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
