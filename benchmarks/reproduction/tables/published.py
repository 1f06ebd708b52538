"""The published tables of the paper, and ours beside them."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from lightning_modules.utilities.statistics import Interval
from lightning_modules.visualization import report

PUBLISHED = Path(__file__).with_name("published.yaml")

Kind = Literal["correlation", "perplexity", "time", "longeval", "training"]
Cells = dict[tuple[str, str], float]
"""Numbers by row and column; a cell that is not there is not known."""
Intervals = Mapping[tuple[str, str], Interval | None]


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Attributes:
        name: Such as ``table5``.
        title: Meaning and unit of its numbers.
        kind: How its numbers are computed.
        columns: Names of its columns.
        rows: The numbers printed in each row, one for each column.
        average: What values are averaged over: ``documents`` or ``tokens``.
        evaluators: Evaluators, if they are not columns.
        measures: For rows of correlations: the measure that is correlated with the scores.
        runs: For rows of trained models: the run, with or without its number of steps.
        gains: For rows of differences: minuend and subtrahend.
        overhead: Published overhead, printed beside times.
        evaluation: For tables of trained models: words of ``longce evaluate`` for all columns, in place of those of
            each benchmark.
        remark: Inconsistencies, and how to read our numbers.
    """

    name: str
    title: str
    kind: Kind
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    average: Literal["documents", "tokens"] = "documents"
    evaluators: tuple[str, ...] = ()
    measures: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, str] = field(default_factory=dict)
    gains: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    overhead: Mapping[str, Any] = field(default_factory=dict)
    evaluation: tuple[str, ...] = ()
    remark: str = ""

    def cells(self) -> Cells:
        """Return the published numbers by row and column."""
        return {
            (row, column): value
            for row, values in self.rows.items()
            for column, value in zip(self.columns, values, strict=True)
        }


@functools.cache
def published() -> dict[str, Any]:
    """Read the file of published numbers: ``models``, ``runs`` of the training and ``tables``."""
    return dict(yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")))


def find_table(name: str) -> Table:
    """Return a table by its name.

    Raises:
        ValueError: If no table has that name.
    """
    tables = published()["tables"]
    if name not in tables:
        raise ValueError(f"No table '{name}': there are {', '.join(tables)}.")
    entry = dict(tables[name])
    entry["columns"] = tuple(entry["columns"])
    entry["rows"] = {row: tuple(map(float, values)) for row, values in entry["rows"].items()}
    entry["gains"] = {row: tuple(pair) for row, pair in entry.get("gains", {}).items()}
    entry["evaluators"] = tuple(entry.get("evaluators", ()))
    entry["evaluation"] = tuple(map(str, entry.get("evaluation", ())))
    return Table(name=name, **entry)


@dataclass(frozen=True)
class NamedModel:
    """A model under the name that tables give it.

    Attributes:
        name: Name of a row or column.
        path: Hub id or local folder.
    """

    name: str
    path: str


def find_model(word: str) -> NamedModel:
    """Find a model as the command line names it: a name or hub id of the paper, ``NAME=PATH``, any hub id or folder.

    Raises:
        ValueError: If one side of the ``=`` is empty, or the word can be neither a known name nor a path.
    """
    name, equals, path = word.partition("=")
    if equals and not (name and path):
        raise ValueError(f"A model is a name, a hub id, a folder or NAME=PATH, got '{word}'.")
    for known, entry in published()["models"].items():
        if name in (known, entry["path"], *entry.get("also", ())):
            return NamedModel(known, path or entry["path"])
    if not equals and "/" not in word and not Path(word).expanduser().exists():
        names = ", ".join(published()["models"])
        raise ValueError(f"'{word}' is not a model of the paper, a hub id or a folder. The paper has: {names}.")
    return NamedModel(name, path or word)


def markdown(table: Table, ours: Cells, intervals: Intervals = MappingProxyType({})) -> str:
    """Format the table as Markdown, our numbers beside those of the paper; unknown cells are blank."""
    rows = [*table.rows, *dict.fromkeys(row for row, _ in ours if row not in table.rows)]
    columns = [*table.columns, *dict.fromkeys(column for _, column in ours if column not in table.columns)]
    theirs = table.cells()
    digits = 2 if table.kind in ("correlation", "perplexity", "longeval") else 1
    cells = [[row] for row in rows]
    for line in cells:
        for name in columns:
            interval = intervals.get((line[0], name))
            ends = "" if interval is None else " [{:.2f}, {:.2f}]".format(*interval)
            both = _text(theirs, line[0], name, digits), _text(ours, line[0], name, digits) + ends
            line.append(" / ".join(both).strip())
    over = {"correlation": "models", "longeval": "questions", "training": "questions"}.get(table.kind, "documents")
    limit = "where the files have them" if table.kind == "training" else "if there are at least 5"
    note = f" Ours have 95% intervals over {over}, {limit}."
    blocks: list[report.Block] = [f"Each cell is: paper / ours.{note}", report.Table(["", *columns], cells)]
    if table.remark:
        blocks.append(table.remark.strip())
    return report.as_markdown(f"{table.name}: {table.title}", blocks)


def as_json(table: Table, ours: Cells, intervals: Intervals = MappingProxyType({})) -> dict[str, Any]:
    """Return the table as dictionaries: by row and column ``paper``, ``ours`` and its interval; null if unknown."""
    theirs = table.cells()
    cells: dict[str, dict[str, Any]] = {}
    for row, column in dict.fromkeys((*theirs, *ours)):
        value = ours.get((row, column), math.nan)
        known = value if math.isfinite(value) else None
        printed = theirs.get((row, column), math.nan)
        cell: dict[str, Any] = {"paper": printed if math.isfinite(printed) else None, "ours": known}
        if (interval := intervals.get((row, column))) is not None:
            cell["interval"] = list(interval)
        cells.setdefault(row, {})[column] = cell
    return {"table": table.name, "title": table.title, "remark": table.remark.strip(), "cells": cells}


def _text(cells: Cells, row: str, column: str, digits: int) -> str:
    value = cells.get((row, column), math.nan)
    return f"{value:.{digits}f}" if math.isfinite(value) else ""
