"""Benchmark scores that others have measured, from CSV and JSON files."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_modules.reproduction.tables import find_model, published

Scores = dict[str, dict[str, float]]
"""By model or run, and by benchmark."""

SCORED = ("correlation", "training")
STEPS = (50, 100, 200)


def read_scores(paths: Sequence[str]) -> Scores:
    """Scores of models and runs.

    A CSV file has a line for each model or run: its name in the column ``model``, and the scores in columns named as
    the benchmarks are in the tables (``LongBench``, ``MMLU``, ..), some of them blank if need be. A JSON file is a
    dictionary of such lines: ``{"Qwen2-7B-128k": {"LongBench": 42.0}}``. In a folder all such files are read.

    Args:
        paths: Files and folders.

    Raises:
        ValueError: If a file cannot be read so, a benchmark is in no table, a score is no finite number, or two files
            give different scores for the same.
    """
    scores: Scores = {}
    for file in _files(paths):
        for place, name, entries in _json_lines(file) if file.suffix == ".json" else _csv_lines(file):
            for benchmark, value in entries.items():
                _add(scores, place, name, benchmark, value)
    return scores


def benchmarks() -> set[str]:
    """Names of scores: columns without their numbers of steps, and ``LongEval 2k``, .. by prompt length (Table 9)."""
    columns = {
        column for table in published()["tables"].values() if table["kind"] in SCORED for column in table["columns"]
    }
    by_length = {f"LongEval {length}" for length in published()["tables"]["table9"]["columns"]}
    return {without_steps(column)[0] for column in columns} | by_length


def without_steps(column: str) -> tuple[str, int | None]:
    """``LongBench 50`` is the score ``LongBench`` after 50 steps; other columns have no number of steps."""
    name, _, steps = column.rpartition(" ")
    return (name, int(steps)) if name and steps.isdigit() and int(steps) in STEPS else (column, None)


def _files(paths: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        inside = sorted((*path.glob("*.csv"), *path.glob("*.json"))) if path.is_dir() else [path]
        if not inside or not all(file.is_file() and file.suffix in (".csv", ".json") for file in inside):
            raise ValueError(f"No scores at '{name}': give .csv or .json files, or a folder of them.")
        files += inside
    return files


def _csv_lines(file: Path) -> list[tuple[str, str, dict[str, Any]]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        if "model" not in (reader.fieldnames or ()):
            raise ValueError(f"'{file}' has no column 'model', only {reader.fieldnames}: add a first line of names.")
        lines = []
        for line in reader:
            name = line.pop("model")
            lines.append((f"{file}:{reader.line_num}", name, {key: value for key, value in line.items() if value}))
        return lines


def _json_lines(file: Path) -> list[tuple[str, str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{file}' is no JSON: {error}.") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise ValueError(f"'{file}' must be a dictionary of models, each a dictionary of benchmarks and scores.")
    return [
        (str(file), name, {key: value for key, value in entry.items() if value is not None})
        for name, entry in content.items()
    ]


def _add(scores: Scores, place: str, name: str, benchmark: str, value: Any) -> None:
    if benchmark not in benchmarks():
        raise ValueError(f"{place}: '{benchmark}' is in no table. There are: {', '.join(sorted(benchmarks()))}.")
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{place}: the score of '{name}' in {benchmark} must be a number, got {value!r}.")
    entries = scores.setdefault(_row(name), {})
    if entries.setdefault(benchmark, score) != score:
        raise ValueError(
            f"{place}: '{name}' has {score} in {benchmark}, and {entries[benchmark]} in another file or line."
            " Leave one of them out."
        )


def _row(name: str) -> str:
    """Under which name tables have the model; names of runs, and of models of the user's own, stay."""
    try:
        return find_model(name).name
    except ValueError:
        return name
