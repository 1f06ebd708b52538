"""Benchmark scores that others have measured, from CSV and JSON files."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_modules.reproduction.tables import find_model, published
from lightning_modules.result_files import json_entries

Scores = dict[str, dict[str, float]]
"""By model or run, and by benchmark."""

SCORED = ("correlation", "training")
STEPS = (50, 100, 200)


def read_scores(paths: Sequence[str]) -> Scores:
    """Scores of models and runs.

    A CSV file has a line for each model or run: its name in the column ``model``, and the scores in columns named as
    the benchmarks are in the tables (``LongBench``, ``MMLU``, ..), some of them blank if need be. A JSON file is a
    dictionary of such lines: ``{"Qwen2-7B-128k": {"LongBench": 42.0}}``; or it is the ``results.json`` of ``longce
    evaluate`` or ``longce harness``, of which those scores count that a table has, for the model's name or NAME. In a
    folder all such files are read.

    Args:
        paths: Files, folders, and NAME=FILE for a result of one model or run.

    Raises:
        ValueError: If a file cannot be read so, a benchmark is in no table, a score is no finite number, or two files
            give different scores for the same.
    """
    scores: Scores = {}
    for file, model in _files(paths):
        for place, name, entries in _json_lines(file, model) if file.suffix == ".json" else _csv_lines(file):
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


def _files(paths: Sequence[str]) -> list[tuple[Path, str | None]]:
    """Files, and the name of the model that they are of, where it is given."""
    files: list[tuple[Path, str | None]] = []
    for word in paths:
        name, _, named = word.partition("=")
        renamed = bool(name and named) and not Path(word).expanduser().exists()
        path = Path(named if renamed else word).expanduser()
        inside = sorted((*path.glob("*.csv"), *path.glob("*.json"))) if path.is_dir() else [path]
        if not inside or not all(file.is_file() and file.suffix in (".csv", ".json") for file in inside):
            raise ValueError(f"No scores at '{word}': give .csv or .json files, or a folder of them.")
        if renamed and (len(inside) > 1 or inside[0].suffix != ".json"):
            raise ValueError(f"'{path}' is no results.json of one model: leave '{name}=' out.")
        files += [(file, name if renamed else None) for file in inside]
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


def _json_lines(file: Path, model: str | None) -> list[tuple[str, str, dict[str, Any]]]:
    lines: list[tuple[str, str, dict[str, Any]]] = []
    for entry in json_entries(file):
        # A result of ours has much that no table has; whoever writes a file by hand may have mistyped a name.
        kept = {name: value for name, value in entry.values.items() if not entry.ours or name in benchmarks()}
        lines.append((entry.place, model or _last_part(entry.model), kept))
    return lines


def _last_part(model: str) -> str:
    """Of a folder, which is named after its run; hub ids stay."""
    return Path(model).name if Path(model).expanduser().is_dir() else model


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
