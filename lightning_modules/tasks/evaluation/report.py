"""Report of an evaluation: numbers, tables and figures."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_modules.tasks.evaluation.plots import figures, short
from lightning_modules.tasks.evaluation.runs import TaskResult
from lightning_modules.tasks.evaluation.summary import RULER_THRESHOLD, Summary, summarize
from lightning_modules.visualization.images import as_svg
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_text_table, write_report

_CAPTIONS = {
    "lengths": "Score by length, with standard errors.",
    "heat_map": "Score by length and depth of the answer.",
    "heat_maps": "The same for each task.",
    "depths": "Score by depth of the answer, with standard errors.",
}
_EXAMPLES = 8


def write_task_report(folder: Path, results: Sequence[TaskResult], settings: Mapping[str, Any], missing: int) -> None:
    """Write ``results.json``, ``report.md``, ``report.html`` and ``figures/*.svg``; ``missing`` questions are open."""
    summary = summarize(results)
    numbers = {"model": settings["model"], **summary.as_json(), "missing": missing, "settings": dict(settings)}
    pictures = {name: as_svg(figure) for name, figure in figures(summary).items()}
    blocks: list[Block] = [
        "Scores in percent, with standard errors where there are several questions.",
        score_table(summary),
        *_sentences(summary, missing),
        *(Picture(name, _CAPTIONS[name]) for name in pictures),
    ]
    if summary.perplexities is not None:
        blocks += [Heading("Perplexity of the tokens of answers / of all others"), perplexity_table(summary)]
    if summary.questions:
        blocks += [Heading("Some answers"), answer_table(results)]
    values = [(name, json.dumps(value)) for name, value in settings.items()]
    blocks += [Heading("Settings"), Table(("setting", "value"), values)]
    write_report(folder, f"Long-context tasks: {settings['model']}", blocks, pictures, numbers, name="results")


def score_table(summary: Summary) -> Table:
    """Return the scores: a row for each task and one for their average, a column for each length."""
    cells = {
        key: f"{mean:.1f}" if math.isnan(error) else f"{mean:.1f} ± {error:.1f}"
        for key, (mean, error, _) in summary.scores.items()
    }
    return _grid(cells, "average", {length: f"{average:.1f}" for length, average in summary.averages.items()})


def perplexity_table(summary: Summary) -> Table:
    """Return the perplexities of answers and of all other tokens, in rows and columns like the scores."""
    by_task, together = (
        {key: f"{answer:.4g} / {other:.4g}" for key, (answer, other) in perplexities.items()}
        for perplexities in (summary.perplexities_by_task, summary.perplexities_by_length)
    )
    return _grid(by_task, "all", together)


def _grid(cells: Mapping[Any, str], last: str, together: Mapping[Any, str]) -> Table:
    tasks, lengths = list(dict.fromkeys(task for task, _ in cells)), sorted({length for _, length in cells})
    rows = [[task, *(cells.get((task, length), "") for length in lengths)] for task in tasks]
    together_row = [last, *(together.get(length, "") for length in lengths)]
    return Table(["task", *map(short, lengths)], [*rows, together_row] if len(tasks) > 1 else rows)


def as_text(summary: Summary, missing: int) -> str:
    """Format the scores for a terminal."""
    return "\n".join([as_text_table(score_table(summary)), "", *_sentences(summary, missing)])


def _sentences(summary: Summary, missing: int) -> list[str]:
    sentences = []
    if missing:
        sentences.append(f"{missing} questions have no result yet: the same command puts them.")
    if summary.averages:
        effective = (
            "none of these lengths" if summary.effective_length is None else f"{summary.effective_length:,} tokens"
        )
        sentences.append(f"Effective length, the longest whose average exceeds {RULER_THRESHOLD}: {effective}.")
        sentences.append(
            f"Average over lengths, longer ones weighing more: {summary.weighted_inc:.1f}; shorter ones:"
            f" {summary.weighted_dec:.1f}."
        )
    if summary.perplexities is not None:
        answer, other = summary.perplexities
        sentences.append(f"Perplexity of the tokens of answers: {answer:.4g}; of all others: {other:.4g}.")
    return [*sentences, f"{summary.questions:,} questions in {summary.seconds:,.0f} s of all processes together."]


def answer_table(results: Sequence[TaskResult], count: int = _EXAMPLES) -> Table:
    """Return some of the model's answers, wrong ones first."""
    ordered = sorted(results, key=lambda result: result.score)
    chosen = ordered[:: max(1, len(ordered) // count)][:count]
    return Table(
        ("task", "length", "depth", "score (%)", "right", "answer"),
        [
            (
                result.task,
                short(result.length),
                "" if result.depth is None else f"{result.depth:.2f}",
                f"{100 * result.score:.0f}",
                _line(", ".join(result.answers)),
                _line(result.prediction),
            )
            for result in chosen
        ],
    )


def _line(text: str, most: int = 160) -> str:
    """Format a text on one line as code, which Markdown leaves alone."""
    line = " ".join(text.split()).replace("`", "'")
    return f"`{line[:most]}{'..' if len(line) > most else ''}`" if line else ""
