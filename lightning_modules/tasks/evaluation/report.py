"""Report of an evaluation: numbers, tables and figures."""

import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence, Set
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.tasks.evaluation.answers import Answer
from lightning_modules.tasks.evaluation.evaluator import EXPLANATION, evaluator_table
from lightning_modules.tasks.evaluation.summary import (
    RULER_THRESHOLD,
    Matrix,
    Score,
    Summary,
    suggest_questions,
    summarize,
)
from lightning_modules.tasks.questions.registry import is_in_essays
from lightning_modules.visualization.images import COLORS, INK, PANEL, STYLE, as_svg
from lightning_modules.visualization.report import (
    Block,
    Heading,
    Picture,
    Table,
    as_text_table,
    format_estimate,
    write_report,
)

_BARS = 4  # tasks beyond which the intervals of a figure would hide its lines
_CAPTIONS = {
    "lengths": f"Score by length, with 95% intervals for at most {_BARS} tasks.",
    "heat_map": "Score by length and depth of the answer.",
    "heat_maps": "The same for each task.",
    "depths": "Score by depth of the answer, with 95% intervals.",
}
POSITION_NOTE = (
    "Best minus worst position, in points: each half of the questions measures the positions that the other half chose."
    " The last columns are over all questions."
)
_COLUMNS = 2
_WIDTH = 100  # of text in a terminal
MIN_QUESTIONS = 10
"""Questions below which a cell of a heat map stays empty: the 95% interval of 9 is up to 60 points wide."""


def write_task_report(folder: Path, answers: Sequence[Answer]) -> Summary:
    """Write ``report.md``, ``report.html`` and ``figures/*.svg``, and return the summary."""
    summary = summarize(answers)
    settings = answers[0].settings
    pictures = {name: as_svg(figure) for name, figure in figures(summary).items()}
    blocks: list[Block] = []
    if summary.as_evaluator:
        blocks += [EXPLANATION, _evaluator_table(summary, settings)]
    blocks.append("Scores in percent, with 95% intervals (Wilson; questions about one text count as dependent).")
    blocks.append(score_table(summary)._replace(folded=False))
    if summary.position_gaps:
        blocks += [POSITION_NOTE, position_table(summary)]
    blocks += _describe_summary(summary, settings)
    if pictures:
        blocks.append(Heading("Curves and maps"))
    for name in pictures:
        blocks.append(Picture(name, f"{_CAPTIONS[name]}{_describe_cells(name, summary)}"))
    if summary.perplexities:
        blocks += [Heading("Perplexity of answer tokens / of all other tokens"), perplexity_table(summary)]
    if summary.questions:
        blocks += [Heading("Some answers"), answer_table(answers)]
    values = []
    for name, value in settings.items():
        values.append((name, value if isinstance(value, str) else json.dumps(value)))
    blocks += [Heading("Settings"), Table(("setting", "value"), values)]
    write_report(folder, f"Long-context tasks: {settings['model']}", blocks, pictures)
    return summary


def score_table(summary: Summary) -> Table:
    """Return a table of scores: a row for each task and one for their average, a column for each length."""
    cells = {}
    for key, score in summary.scores.items():
        cells[key] = format_estimate(score.mean, score.interval, ".1f", ".0f")
    averages = {}
    for length, mean in summary.averages.items():
        averages[length] = format_estimate(mean, summary.average_intervals[length], ".1f", ".0f")
    return _make_grid(cells, "average", averages)


def position_table(summary: Summary) -> Table:
    """Return a table of the scores at the best position minus those at the worst, a row for each task and length."""
    rows = []
    for (task, length), found in summary.position_gaps.items():
        best = f"{found.best_score:.1f} at {found.best:.2f}"
        worst = f"{found.worst_score:.1f} at {found.worst:.2f}"
        gap = format_estimate(found.gap, found.interval, ".1f", ".0f")
        rows.append((task, short(length), gap, best, worst))
    return Table(("task", "length", "best minus worst", "best position", "worst position"), rows)


def perplexity_table(summary: Summary) -> Table:
    """Return a table of the perplexities of answer tokens and of all other tokens, by task and length."""
    cells = {}
    together = {}
    for (task, length), (answer, other) in summary.perplexities.items():
        cell = f"{answer:.4g} / {other:.4g}"
        if task is None:
            together[length] = cell
        else:
            cells[task, length] = cell
    return _make_grid(cells, "all", together)


def _make_grid(cells: Mapping[Any, str], last: str, together: Mapping[Any, str]) -> Table:
    lengths = sorted({length for _, length in cells})
    by_task: dict[str, dict[Any, str]] = {}
    for (task, length), cell in cells.items():
        by_task.setdefault(task, {})[length] = cell
    rows = []
    for task, by_length in by_task.items():
        rows.append([task, *(by_length.get(length, "") for length in lengths)])
    if len(by_task) > 1:
        rows.append([last, *(together.get(length, "") for length in lengths)])
    return Table(["task", *map(short, lengths)], rows)


def as_text(summary: Summary, settings: Mapping[str, Any]) -> str:
    """Format the scores for a terminal."""
    lines = [as_text_table(score_table(summary)), ""]
    if summary.position_gaps:
        lines += [POSITION_NOTE, as_text_table(position_table(summary)), ""]
    lines += _describe_summary(summary, settings)
    if summary.as_evaluator:
        table = as_text_table(_evaluator_table(summary, settings), left=(0, 1))
        lines = [table, "", textwrap.fill(EXPLANATION, _WIDTH), "", *lines]
    return "\n".join(lines)


def _evaluator_table(summary: Summary, settings: Mapping[str, Any]) -> Table:
    return evaluator_table({os.path.basename(os.path.normpath(settings["model"])): summary.as_evaluator})


def describe_synthetic_text(tasks: Set[str], settings: Mapping[str, Any]) -> list[str]:
    """Describe which scores are not those of the original tasks, because their text is synthetic."""
    sentences = []
    essays: list[str] = []
    if settings.get("haystack") is None:
        essays = sorted(filter(is_in_essays, tasks))
    if essays:
        sentences.append(
            f"The text around the needles of {', '.join(essays)} is synthetic: these are not scores of RULER or"
            " Needle-in-a-Haystack, which use essays. Pass a folder of essays by `--haystack`."
        )
    passages = sorted(task for task in tasks if task.startswith("multi_document_qa"))
    if settings.get("nq_open") is None and passages:
        sentences.append(
            f"The passages of {', '.join(passages)} are synthetic: these are not scores of Lost in the Middle. Pass"
            " its file by `--nq_open`."
        )
    return sentences


def _describe_summary(summary: Summary, settings: Mapping[str, Any]) -> list[str]:
    provenance = Provenance.read(settings)
    sentences = []
    if provenance:
        sentences.append(f"Model: {settings['model']} ({provenance}).")
    sentences += describe_synthetic_text({task for task, _ in summary.scores}, settings)
    if summary.missing:
        sentences.append(f"{summary.missing} questions have no result yet: run the same command to ask them.")
    effective = summary.effective_length
    if effective is not None:
        length, low, high = map(_format_effective, effective)
        unit = " tokens" if effective.length else ""
        sentences.append(
            f"Effective length, the longest whose average exceeds {RULER_THRESHOLD}: {length}{unit}"
            f" (95% interval: {low} to {high})."
        )
    if summary.averages:
        sentences.append(
            f"Average over lengths with larger weights for longer ones: {summary.weighted_inc:.1f}; for shorter ones:"
            f" {summary.weighted_dec:.1f}."
        )
    needed = suggest_questions(summary.scores)
    if needed:
        sentences.append(f"For intervals of at most 5 points to each side: about {needed:,} questions in each cell.")
    if summary.perplexities:
        answer, other = summary.perplexities[None, None]
        sentences.append(f"Perplexity of answer tokens: {answer:.4g}; of all other tokens: {other:.4g}.")
    return [*sentences, f"{summary.questions:,} questions in {summary.seconds:,.0f} s, summed over all processes."]


def _format_effective(length: int | None) -> str:
    if length is None:
        return "none of these lengths"
    return f"{length:,}"


def answer_table(answers: Sequence[Answer], count: int = 8) -> Table:
    """Return some of the model's answers, wrong ones first; under teacher forcing, the likeliest tokens instead."""
    given = [answer for answer in answers if not math.isnan(answer.score)]
    ordered = sorted(given, key=lambda answer: answer.score)
    chosen = ordered[:: max(1, len(ordered) // count)][:count]
    generated = all(answer.answer_nll is None for answer in chosen)
    last_column = "answer" if generated else "likeliest tokens"
    rows = []
    for answer in chosen:
        depth = "" if answer.depth is None else f"{answer.depth:.2f}"
        right = _format_line(", ".join(answer.right_answers))
        score = f"{100 * answer.score:.0f}"
        rows.append((answer.task, short(answer.length), depth, score, right, _format_line(answer.prediction)))
    return Table(("task", "length", "depth", "score (%)", "right", last_column), rows)


def _format_line(text: str, maximum: int = 160) -> str:
    """Format a text on one line as Markdown code; say so if it is blank."""
    line = " ".join(text.split()).replace("`", "'")
    if not line:
        return "(only white space)" if text else "(nothing)"
    if len(line) > maximum:
        line = f"{line[:maximum]}.."
    return f"`{line}`"


@matplotlib.rc_context(STYLE)
def figures(summary: Summary) -> dict[str, Figure]:
    """Draw the figures that have data, by name: ``lengths``, ``heat_map``, ``heat_maps``, ``depths``."""
    found: dict[str, Figure] = {}
    if summary.scores:
        found["lengths"] = score_by_length(summary.scores, summary.averages, ruler=summary.effective_length is not None)
    drawn = drawn_heat_maps(summary)
    if summary.heat_maps:
        name, matrix = next(iter(summary.heat_maps.items()))
        if name in drawn:
            title = "all tasks with a depth" if name == "all" else name
            found["heat_map"] = heat_maps({title: drawn.pop(name)})
        found["depths"] = position_curves(matrix)
    if drawn:
        found["heat_maps"] = heat_maps(drawn)
    return found


def drawn_heat_maps(summary: Summary) -> dict[str, Matrix]:
    """Return the heat maps that have a cell of `MIN_QUESTIONS` questions or more, without their other cells."""
    found = {}
    for name, matrix in summary.heat_maps.items():
        enough = matrix.questions >= MIN_QUESTIONS
        if enough.any():
            found[name] = matrix._replace(scores=np.where(enough, matrix.scores, np.nan))
    return found


def _describe_cells(name: str, summary: Summary) -> str:
    """Describe the number of questions per cell of a heat map; empty for other figures."""
    maps = list(summary.heat_maps.values())
    shown = {"heat_map": maps[:1], "heat_maps": maps[1:]}.get(name)
    if not shown:
        return ""
    counts = np.concatenate([matrix.questions[matrix.questions > 0] for matrix in shown])
    least = counts.min()
    most = counts.max()
    number = f"{least}" if least == most else f"{least} to {most}"
    sentence = f" A cell has {number} questions."
    if least < MIN_QUESTIONS:
        sentence += f" Cells of fewer than {MIN_QUESTIONS} are empty."
    return sentence


def score_by_length(scores: Mapping[tuple[str, int], Score], averages: Mapping[int, float], *, ruler: bool) -> Figure:
    """Draw a line for each task, a thick line for their average, and for ``ruler``'s tasks their threshold."""
    by_task: dict[str, dict[int, Score]] = {}
    for (task, length), score in scores.items():
        by_task.setdefault(task, {})[length] = score
    width, height = PANEL
    figure = Figure(figsize=(width, height + 0.09 * len(by_task)), layout="constrained")
    axis = figure.subplots()
    looks = zip(cycle("osD^vP*"), cycle(COLORS), strict=False)
    for (task, by_length), (marker, color) in zip(by_task.items(), looks, strict=False):
        lengths = sorted(by_length)
        means = []
        ends = []
        for length in lengths:
            score = by_length[length]
            means.append(score.mean)
            ends.append(score.interval or (score.mean, score.mean))
        axis.plot(lengths, means, color=color, lw=1, marker=marker, markersize=3, label=task)
        if len(by_task) <= _BARS:
            axis.vlines(lengths, *np.array(ends).T, color=color, lw=0.8)
    if len(by_task) > 1:
        axis.plot(list(averages), list(averages.values()), "o-", color=INK, lw=2.5, markersize=5, label="average")
    if ruler:
        axis.axhline(RULER_THRESHOLD, color=COLORS[-1], ls=":", lw=1, label=f"RULER's threshold, {RULER_THRESHOLD}")
    ticks = sorted({length for _, length in scores})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [short(length) for length in ticks])
    axis.set_xticks([], minor=True)
    axis.set(xlabel="length (tokens)", ylabel="score (%)", ylim=(-3, 103))
    figure.legend(loc="outside lower left", ncols=2, fontsize=7)
    return figure


def heat_maps(matrices: Mapping[str, Matrix]) -> Figure:
    """Draw heat maps of length by depth; a single map is larger and has the score in each cell."""
    single = len(matrices) == 1
    columns = min(_COLUMNS, len(matrices))
    rows = -(-len(matrices) // columns)
    height = 1.5 * rows + 0.6
    if single:
        height = 1.4 + 0.15 * max(len(matrix.depths) for matrix in matrices.values())
    figure = Figure(figsize=(PANEL[0], height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(matrices) :]:
        axis.set_axis_off()
    for axis, (title, matrix) in zip(axes.flat, matrices.items(), strict=False):
        image = _draw_cells(axis, matrix, numbers=single)
        axis.set_title(title)
    figure.colorbar(image, ax=axes, label="score (%)", location="top", aspect=40)
    figure.supxlabel("length (tokens)", fontsize=8)
    figure.supylabel("depth of the answer (%)", fontsize=8)
    return figure


def position_curves(matrix: Matrix) -> Figure:
    """Draw scores by depth with 95% intervals, a line for each length: a U shape if the middle is lost."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axis = figure.subplots()
    lengths = [short(length) for length in matrix.lengths]
    for color, length, scores, low, high in zip(cycle(COLORS), lengths, *matrix[2:5], strict=False):
        known = ~np.isnan(scores)
        depths = 100 * np.array(matrix.depths)[known]
        axis.plot(depths, scores[known], "o-", color=color, markersize=3, label=length)
        axis.fill_between(depths, low[known], high[known], color=color, alpha=0.12, lw=0)
    axis.set(xlabel="depth of the answer (%): 0 front, 100 end", ylabel="score (%)", ylim=(-3, 103))
    figure.legend(title="length (tokens)", title_fontsize=8, loc="outside lower left", ncols=4)
    return figure


def short(length: int) -> str:
    """Abbreviate a number of tokens: 4k for 4096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _draw_cells(axis: Axes, matrix: Matrix, *, numbers: bool) -> Any:
    cells = matrix.scores.T
    image = axis.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axis.set_facecolor("#ddd")  # for cells without measurements
    axis.grid(visible=False)
    every = max(1, len(matrix.depths) // (10 if numbers else 5))
    places = range(0, len(matrix.depths), every)
    axis.set_yticks(places, [f"{100 * matrix.depths[place]:.0f}" for place in places], fontsize=7)
    axis.set_xticks(range(len(matrix.lengths)), [short(length) for length in matrix.lengths], fontsize=7)
    if numbers:
        for (row, column), score in np.ndenumerate(cells):
            if not np.isnan(score):
                color = "black" if score > 47 else "white"  # a contrast of 4.5 or more with each color of the map
                axis.text(column, row, f"{score:.0f}", ha="center", va="center", color=color, fontsize=7)
    return image
