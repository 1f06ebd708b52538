"""The page of a comparison: the verdict and its picture, the tables, the evaluators, and curves over each axis."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.utilities.statistics import corpus_mean
from lightning_modules.visualization.images import curves_as_svg
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_html
from longce.compare.ratios import Ratio
from longce.compare.runs import AXES, Cell, ComparedRun
from longce.compare.verdict import DRAWN, draw_ratios

_EXPLANATION = (
    "LongPPL is the perplexity over key tokens, which the evaluator predicts much better with the long context (by more"
    " than alpha nats) than with a short one, and well (above beta); perplexity is over all tokens, and soft LongPPL"
    " weights them by the evaluator's soft influence. K and d are the length of the shortest short context and the"
    " number of tokens that share one. Ratios are over the documents that both runs have with equal numbers of tokens"
    " and key tokens; below 1 is better. Models with different tokenizers are compared by bits per byte of the text and"
    " of its key spans, and by LongPPL per token of the evaluator. The 95% intervals are about the choice of documents,"
    " not about the noise of training."
)
_RATIOS_CAPTION = (
    "Numbers of the last evaluations over those of {}, the baseline, with 95% intervals. Left of the line is better; a"
    " filled dot has an interval that excludes a tie."
)
_POINTS = 200  # of a curve; longer ones are averaged


def make_page(
    runs: Sequence[ComparedRun],
    baseline: str,
    verdict: Sequence[str],
    ratios: Sequence[Ratio],
    tables: Mapping[str, Table],
    evaluators: str,
    names: Mapping[Cell, str],
) -> str:
    """Return the page as HTML; ``evaluators`` describes them, and ``names`` are those of cells."""
    blocks: list[Block] = [*verdict]
    pictures: dict[str, str] = {}
    drawn = [ratio for ratio in ratios if DRAWN[0] < ratio.value < DRAWN[1]]
    if drawn:
        pictures["ratios"] = draw_ratios(drawn, names)
        blocks.append(Picture("ratios", _RATIOS_CAPTION.format(baseline)))
    for heading, table in tables.items():
        if table.rows:
            blocks += [Heading(heading), table]
    if evaluators:
        blocks.append(evaluators)
    blocks.append(_EXPLANATION)
    folded = False
    for axis in AXES:
        curves = draw_curves(runs, axis, names)
        if curves:
            blocks.append(Heading(f"Curves by {axis}", folded=folded))
            folded = True  # the other axes show the same values
        for title, svg in curves.items():
            pictures[f"{axis}, {title}"] = svg
            blocks.append(Picture(f"{axis}, {title}", title))
    noun = "Run" if len(runs) == 1 else "Runs"
    return as_html(f"{noun} {', '.join(run.name for run in runs)}", blocks, pictures)


def draw_curves(runs: Sequence[ComparedRun], axis: str, names: Mapping[Cell, str]) -> dict[str, str]:
    """Return figures as SVG by title: LongPPL, perplexity, loss and learning rate of the runs that logged the axis."""
    curves = {run.name: _find_curves(run, names) for run in runs if run.scalars.get(AXES[axis])}
    figures = {}
    for title in dict.fromkeys(chain.from_iterable(curves.values())):
        lines = []
        logged = []
        for run in runs:  # also those without such a curve, so that a run looks the same in each figure
            curve = curves.get(run.name, {}).get(title, {})
            points = place_points(curve, run.scalars.get(AXES[axis], {}))
            lines.append((run.name, points[:, 0], points[:, 1]))
            logged += points[:, 1].tolist()
        if logged:
            wide = min(logged) > 0 and max(logged) > 10 * min(logged)
            figures[title] = curves_as_svg(lines, x=axis, y=title.partition(":")[0], log=wide)
    return figures


def _find_curves(run: ComparedRun, names: Mapping[Cell, str]) -> dict[str, Mapping[int, float]]:
    """Return the values of each quantity by optimizer step."""
    longppl: dict[str, Mapping[int, float]] = {}
    perplexity: dict[str, Mapping[int, float]] = {}
    for cell in sorted(run.evaluations, key=lambda each: names[each]):
        steps = run.evaluations[cell]
        longppl[f"LongPPL: {names[cell]}"] = _measure_steps(steps, "longppl")
        place = names[Cell(cell.set, numerics=cell.numerics)]  # whoever finds key tokens
        perplexity[f"Perplexity: {place}"] = _measure_steps(steps, "perplexity")
    curves = {**longppl, **perplexity, "Training loss (nats)": run.scalars.get("train/loss", {})}
    for key, values in run.scalars.items():
        if key.startswith("lr-"):
            curves[f"Learning rate: {key[3:]}"] = values
    return curves


def _measure_steps(steps: Mapping[int, pd.DataFrame], kind: str) -> dict[int, float]:
    return {step: corpus_mean(documents, kind) for step, documents in steps.items()}


def place_points(curve: Mapping[int, float], axis: Mapping[int, float]) -> NDArray[np.float64]:
    """Return ``[N, 2]`` points of a curve by optimizer step over an axis, which is 0 before the first step."""
    points = np.array(sorted(curve.items()), dtype=np.float64).reshape(-1, 2)
    steps = sorted(axis)
    values = [axis[step] for step in steps]
    points[:, 0] = np.interp(points[:, 0], [0, *steps], [0.0, *values])
    points = points[np.isfinite(points[:, 1])]
    chunks = np.array_split(points, _POINTS)
    return np.array([chunk.mean(axis=0) for chunk in chunks if len(chunk)]).reshape(-1, 2)
