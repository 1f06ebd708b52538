"""Compare the scores of several models on the same tasks: folders of ``longce evaluate``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lightning_modules.statistics import score_difference
from lightning_modules.tasks.evaluation.report import describe_synthetic_text
from lightning_modules.visualization.report import Table

FILES = ("results.json", "harness.json")
_QUESTIONS = ("mode", "seed", "documents", "haystack", "squad", "hotpot", "nq_open")  # settings that make questions

_UNITS = "Scores in percent (metrics of lm-evaluation-harness as they are), with 95% intervals."
_KEY = ["task", "length", "asked_depth", "index"]

Cells = dict[tuple[str, str], str]
"""Scores with 95% intervals, as text, by task and by length or metric."""


class Evaluation(NamedTuple):
    """Scores of a model, and the questions of longce's tasks, each with a score from 0 to 1."""

    name: str
    cells: Cells
    questions: pd.DataFrame
    settings: dict[str, Any]


def read_evaluation(name: str, folder: Path) -> Evaluation:
    """Read a folder; a ``ValueError`` if its files are damaged."""
    try:
        found = [json.loads((folder / file).read_bytes()) for file in FILES if (folder / file).is_file()]
        cells: Cells = {}
        for content in found:
            cells |= _harness_cells(content) if "groups" in content else _own_cells(content)
        lines = [line for file in sorted(folder.glob("results-*.jsonl")) for line in file.read_text().splitlines()]
        questions = pd.DataFrame([json.loads(line) for line in lines], columns=[*_KEY, "score"]).astype({"length": str})
        return Evaluation(name, cells, questions.drop_duplicates(_KEY), found[0]["settings"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{folder}' is not a folder of `longce evaluate`, or is damaged ({error!r}).") from error


def _own_cells(content: dict[str, Any]) -> Cells:
    cells = {
        (task, length): _format_score(cell["mean"], cell["interval"])
        for task, lengths in content["tasks"].items()
        for length, cell in lengths.items()
    }
    averages = content["average"].items() if len(content["tasks"]) > 1 else ()
    intervals = content["average_intervals"]
    return cells | {("average", length): _format_score(mean, intervals[length]) for length, mean in averages}


def _harness_cells(content: dict[str, Any]) -> Cells:
    """Return percents of sets, and metrics of tasks and groups in the harness's units."""
    metrics = {name: entry["metrics"] for name, entry in content["tasks"].items()} | content["groups"]
    intervals = content.get("intervals", {})
    cells = {
        (task, key.removesuffix(",none")): _format_score(value, intervals.get(task, {}).get(key), digits=3)
        for task, entry in metrics.items()
        for key, value in entry.items()
        if "_stderr," not in key and value is not None
    }
    sets = {(name, "score, %"): _format_score(value, intervals.get(name)) for name, value in content["scores"].items()}
    return cells | sets


def tabulate_evaluations(evaluations: Sequence[Evaluation]) -> tuple[Table, list[str]]:
    """Return a table of scores with 95% intervals, and notes on how to read it.

    With longce's tasks it has the differences from the first model over the same questions, if these are the same.
    """
    baseline, *others = evaluations
    notes: list[str] = []
    paired: list[Evaluation] = []
    for other in others:
        if baseline.questions.empty or other.questions.empty:
            continue
        if differing := _differing_settings(baseline, other):
            notes.append(f"{other.name} was asked other questions than {baseline.name} ({differing}): no differences.")
        else:
            paired.append(other)
    head = ["task", "length or metric", *(each.name for each in evaluations)]
    head += [f"{other.name} - {baseline.name}" for other in paired]
    synthetic = {
        note for each in evaluations for note in describe_synthetic_text(set(each.questions["task"]), each.settings)
    }
    notes = [_UNITS + " Differences are over the same questions." * bool(paired), *notes, *sorted(synthetic)]
    rows = []
    for place in dict.fromkeys(place for each in evaluations for place in each.cells):
        differences = [_subtract_scores(other, baseline, place) for other in paired]
        rows.append([*place, *(each.cells.get(place, "") for each in evaluations), *differences])
    return Table(head, rows), notes


def _differing_settings(one: Evaluation, other: Evaluation) -> str:
    pairs = [(name, one.settings.get(name), other.settings.get(name)) for name in _QUESTIONS]
    return ", ".join(f"{name} = {first!r} and {second!r}" for name, first, second in pairs if first != second)


def _subtract_scores(one: Evaluation, other: Evaluation, place: tuple[str, str]) -> str:
    """Return the difference of the scores in percent, over the questions that both have answered."""
    tables = [each.questions[(each.questions[["task", "length"]] == [*place]).all(axis=1)] for each in (one, other)]
    both = tables[0].merge(tables[1], on=_KEY)
    if both.empty:
        return ""
    value, interval = score_difference(both["score_x"], both["score_y"], both["index"].tolist())
    return _format_score(100 * value, interval and (100 * interval[0], 100 * interval[1]), sign="+")


def _format_score(value: float, interval: Sequence[float] | None, *, digits: int = 1, sign: str = "") -> str:
    ends = "" if interval is None else " [{}, {}]".format(*(f"{end:{sign}.{digits - 1}f}" for end in interval))
    return f"{value:{sign}.{digits}f}{ends}"
