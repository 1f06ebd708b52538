"""Compute the cells of our tables from results, times and benchmark scores."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.reproduction.tables.published import Cells, Intervals, Table
from benchmarks.reproduction.tables.results import ITSELF, Result, mean_seconds, read_times, seconds_interval
from benchmarks.reproduction.tables.scores import ScoreIntervals, Scores, without_steps
from lightning_modules.utilities.statistics import Correlation, Interval, correlate_values, difference_interval
from longce.compare.runs import read_runs

DEFAULT = "alpha=2 beta=-2"
HOURS = "Training hours"
GPUS = 8
"""Number of GPUs of the paper's trainings."""

Results = Mapping[tuple[str, str], Result]


def ours(table: Table, results: Results, scores: Scores, folders: Sequence[Path]) -> Cells:
    """Return the known cells of a table.

    Args:
        table: The table of the paper.
        results: Results of models and evaluators; failed ones are ignored.
        scores: Benchmark scores by model or run.
        folders: Folders of results, for the times of evaluators and of trainings.
    """
    good = {key: result for key, result in results.items() if result.failure is None}
    if table.kind == "training":
        return training_cells(table, scores, folders)
    if table.kind == "longeval":
        return _longeval_cells(table, scores)
    if table.kind == "correlation":
        return {place: found.value for place, found in correlations(table, good, scores).items()}
    return _finite(_time_cells(table, good, folders) if table.kind == "time" else _perplexity_cells(table, good))


def correlations(table: Table, results: Results, scores: Scores) -> dict[tuple[str, str], Correlation]:
    """Return Pearson correlations of measures and benchmark scores over models with both, if there are at least 3."""
    found = {}
    chosen = {model: result for (model, evaluator), result in results.items() if evaluator in table.evaluators[:1]}
    for row, measure in table.measures.items():
        values = {model: result.value(measure, table.average) for model, result in chosen.items()}
        for column in table.columns:
            pairs = [
                (value, scores[model][column])
                for model, value in values.items()
                if math.isfinite(value) and column in scores.get(model, {})
            ]
            with suppress(ValueError):  # too few models, or equal values
                x, y = zip(*pairs, strict=True)
                found[row, column] = correlate_values(x, y, "pearson")
    return found


def scored_models(table: Table, results: Results, scores: Scores) -> list[str]:
    """Return the models that correlations may use."""
    return sorted(
        model
        for (model, evaluator), result in results.items()
        if evaluator in table.evaluators[:1] and result.failure is None and scores.get(model)
    )


def training_cells(table: Table, scores: Scores, folders: Sequence[Path] = ()) -> Cells:
    """Return scores of runs after some steps, the differences between runs, and averages over all tasks of a table.

    Hours of training that no file has are those of the runs in ``folders``, on the paper's number of GPUs.
    """
    cells: Cells = {}
    if any(without_steps(column)[0] == HOURS for column in table.columns):
        scores = _add_hours(table, scores, folders)
    for row in table.rows:
        for column in table.columns:
            benchmark, steps = without_steps(column)
            run = table.runs.get(row, row)
            name = run if steps is None else f"{run}-{steps}"
            if benchmark in scores.get(name, {}):
                cells[row, column] = scores[name][benchmark]
    _average(table, cells)
    for row, (more, less) in table.gains.items():
        for column in table.columns:
            if (more, column) in cells and (less, column) in cells:
                cells[row, column] = cells[more, column] - cells[less, column]
    return cells


def _add_hours(table: Table, scores: Scores, folders: Sequence[Path]) -> Scores:
    """Return the scores, and the hours of the runs of a table that no file of scores has."""
    found = {name: dict(values) for name, values in scores.items()}
    for run in table.runs.values():
        for step, hours in training_hours(run, folders).items():
            found.setdefault(f"{run}-{step}", {}).setdefault(HOURS, hours)
    return found


def training_hours(run: str, folders: Sequence[Path]) -> Mapping[int, float]:
    """Return the hours of a run by optimizer step, from the first folder that has it, else none.

    They are its device hours, which do not contain evaluations, divided by the number of the paper's GPUs.
    """
    for folder in folders:
        path = folder / "runs" / run
        if (path / "config.yaml").is_file():
            (found,) = read_runs([path])
            return {step: hours / GPUS for step, hours in found.scalars.get("train/gpu_hours", {}).items()}
    return {}


def training_intervals(table: Table, cells: Cells, known: ScoreIntervals) -> Intervals:
    """Return the intervals of scores, and of gains, whose runs count as independent although they share questions."""
    found: dict[tuple[str, str], Interval | None] = {}
    for row, column in cells:
        benchmark, steps = without_steps(column)
        run = table.runs.get(row, row)
        found[row, column] = known.get((run if steps is None else f"{run}-{steps}", benchmark))
    for row, (more, less) in table.gains.items():
        for column in table.columns:
            first, second = found.get((more, column)), found.get((less, column))
            if first and second:
                pairs = (cells[more, column], first), (cells[less, column], second)
                found[row, column] = difference_interval(*pairs, correlation=0.0)
    return found


def _average(table: Table, cells: Cells) -> None:
    tasks = [column for column in table.columns if column != "Avg."]
    for row in table.rows if "Avg." in table.columns else ():
        values = [cells.get((row, column), math.nan) for column in tasks]
        mean = math.fsum(values) / len(values)
        if math.isfinite(mean):
            cells.setdefault((row, "Avg."), mean)


def _perplexity_cells(table: Table, results: Results) -> Cells:
    cells: Cells = {}
    for (model, evaluator), result in results.items():
        if "PPL" in table.columns and evaluator != ITSELF:
            cells[model, evaluator] = result.value(DEFAULT, table.average)
            cells.setdefault((model, "PPL"), result.value("perplexity", table.average))
        elif "PPL" not in table.columns and evaluator == ITSELF:
            cells[model, "LongPPL"] = result.value(DEFAULT, table.average)
    return cells


def _time_cells(table: Table, results: Results, folders: Sequence[Path]) -> Cells:
    cells: Cells = {}
    for (model, evaluator), result in results.items():
        seconds = mean_seconds([document.seconds for document in result.documents])
        cells.setdefault((model, "PPL"), seconds)
        if evaluator != ITSELF:
            cells[model, f"LongPPL ({evaluator})"] = cells[model, "PPL"] + mean_seconds(read_times(folders, evaluator))
    return cells


def measured_intervals(table: Table, results: Results, folders: Sequence[Path]) -> Intervals:
    """Return the 95% intervals over documents of perplexities and times; None for too few documents."""
    found: dict[tuple[str, str], Interval | None] = {}
    for (model, evaluator), result in results.items():
        if result.failure is not None:
            continue
        if table.kind == "time":
            seconds = [document.seconds for document in result.documents]
            found.setdefault((model, "PPL"), seconds_interval(seconds))
            if evaluator != ITSELF:
                both = seconds_interval(seconds, read_times(folders, evaluator))
                found[model, f"LongPPL ({evaluator})"] = both
        elif table.kind == "perplexity":
            column = "LongPPL" if evaluator == ITSELF else evaluator
            found[model, column] = result.interval(DEFAULT, table.average)
            found.setdefault((model, "PPL"), result.interval("perplexity", table.average))
    return found


def _longeval_cells(table: Table, scores: Scores) -> Cells:
    """Return accuracies by prompt length that were measured elsewhere."""
    cells: Cells = {}
    for row in table.rows:
        model, _, quantity = row.partition(": ")
        known = scores.get(model, {}) if quantity == "LongEval accuracy" else {}
        cells |= {
            (row, length): known[f"LongEval {length}"] for length in table.columns if f"LongEval {length}" in known
        }
    return cells


def _finite(cells: Cells) -> Cells:
    return {place: value for place, value in cells.items() if math.isfinite(value)}
