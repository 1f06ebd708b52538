"""Read benchmark scores from result files, under the names of the paper's tables."""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reproduction.tables.published import find_model, published
from lightning_modules.utilities.statistics import Interval
from longce.correlate.result_files import is_perplexity, read_results

Scores = dict[str, dict[str, float]]
"""By model or run, and by benchmark."""

ScoreIntervals = dict[tuple[str, str], Interval | None]
"""95% intervals of scores by model or run and by benchmark, of results of ``longce evaluate``."""

SCORED = ("correlation", "training")
STEPS = (50, 100, 200)


def read_scores(paths: Sequence[str]) -> Scores:
    """Read benchmark scores of models and runs, under the names that the tables use.

    Perplexities are left out, as `reproduce` measures them itself; so are scores of ``longce evaluate`` that no
    table has.

    Args:
        paths: As in `longce.correlate.result_files.read_results`; benchmarks are named as in the
            tables (``LongBench``, ``MMLU``, ..).

    Raises:
        ValueError: If a file cannot be read, a benchmark is in no table, a score is not a finite number, or two files
            give different scores for the same benchmark.
    """
    scores: Scores = {}
    for entry in read_results(paths):
        for benchmark, value in entry.values.items():
            # Results of commands hold much that no table has; a file written by hand, which records no settings, may
            # have a mistyped name.
            if not is_perplexity(benchmark) and (not value.settings or benchmark in benchmarks()):
                _add(scores, entry.place, _table_name(entry.model), benchmark, value.number)
    return scores


def read_score_intervals(paths: Sequence[str]) -> ScoreIntervals:
    """Read the intervals of the scores that `read_scores` reads from results of ``longce evaluate``."""
    intervals: ScoreIntervals = {}
    for entry in read_results(paths):
        for name, value in entry.values.items():
            if value.interval is not None and name in benchmarks():
                intervals[_table_name(entry.model), name] = value.interval
    return intervals


def benchmarks() -> set[str]:
    """Return the names of scores: columns without steps, and ``LongEval 2k``, .. by prompt length (Table 9)."""
    columns = {
        column for table in published()["tables"].values() if table["kind"] in SCORED for column in table["columns"]
    }
    by_length = {f"LongEval {length}" for length in published()["tables"]["table9"]["columns"]}
    return {without_steps(column)[0] for column in columns} | by_length


def without_steps(column: str) -> tuple[str, int | None]:
    """Split ``LongBench 50`` into ``LongBench`` and 50 steps; other columns have no number of steps."""
    name, _, steps = column.rpartition(" ")
    return (name, int(steps)) if name and steps.isdigit() and int(steps) in STEPS else (column, None)


def _add(scores: Scores, place: str, name: str, benchmark: str, score: float) -> None:
    if benchmark not in benchmarks():
        raise ValueError(f"{place}: '{benchmark}' is in no table. There are: {', '.join(sorted(benchmarks()))}.")
    if not math.isfinite(score):
        raise ValueError(f"{place}: the score of '{name}' in {benchmark} must be a finite number, got {score}.")
    entries = scores.setdefault(name, {})
    if entries.setdefault(benchmark, score) != score:
        raise ValueError(
            f"{place}: '{name}' has {score} in {benchmark}, and {entries[benchmark]} in another file or line."
            " Leave one of them out."
        )


def _table_name(model: str) -> str:
    """Return the name of a model in the tables; names of run folders and of other models stay."""
    name = Path(model).name if Path(model).expanduser().is_dir() else model
    try:
        return find_model(name).name
    except ValueError:
        return name
