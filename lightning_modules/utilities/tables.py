"""Rows of a named tuple or dataclass in parquet files; a nested one is stored in a column for each of its fields."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_modules.utilities.files import atomic_file

Row = TypeVar("Row")

_list_fields: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def write_rows(path: str | os.PathLike[str], rows: Sequence[Row], kind: type[Row], *, format: str) -> None:
    """Write rows of a type to a parquet file with a column for each number and name, atomically.

    ``format`` is the name of the format, which changes with the columns.
    """
    import pyarrow
    import pyarrow.parquet

    fields = [pyarrow.field(name, _find_type(hint)) for name, hint in _list_columns(kind).items()]
    schema = pyarrow.schema(fields, metadata={"format": format})
    table = pyarrow.Table.from_pylist([_to_columns(row, kind) for row in rows], schema)
    with atomic_file(Path(path)) as stream:
        pyarrow.parquet.write_table(table, stream)


def read_rows(path: str | os.PathLike[str], kind: type[Row], *, format: str, contents: str) -> list[Row]:
    """Read the rows of a file; ``contents`` describes them in messages.

    Raises:
        ValueError: If the file does not hold such rows.
    """
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"'{path}' is not a file of {contents}: {error}") from error
    if (table.schema.metadata or {}).get(b"format") != format.encode():
        raise ValueError(
            f"'{path}' does not hold {contents} in the format {format}: if longce 0.1 wrote it, move it away, and"
            " measure again."
        )
    return [_from_columns(row, kind) for row in table.to_pylist()]


def read_format(path: str | os.PathLike[str]) -> str:
    """Return the name of the format that a parquet file records; empty without a name, or for other files."""
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(path).metadata or {}
    except pyarrow.ArrowException:
        return ""
    return str(metadata.get(b"format", b"").decode())


def _list_columns(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return the columns of a type and their types."""
    columns: dict[str, Any] = {}
    for name, hint in _list_fields(kind).items():
        if _has_fields(hint):
            columns |= _list_columns(hint, f"{prefix}{name}.")
        else:
            columns[f"{prefix}{name}"] = hint
    return columns


def _has_fields(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, tuple))


def _find_type(hint: Any) -> Any:
    """Return the type of a column in parquet; a value that may be None is null in it."""
    import pyarrow

    types = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    if get_origin(hint) is tuple:  # of values of one type
        return pyarrow.list_(_find_type(get_args(hint)[0]))
    known = [each for each in get_args(hint) or (hint,) if each is not NoneType]
    return types.get(known[0], pyarrow.string())


def _to_columns(row: Any, kind: type, prefix: str = "") -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, hint in _list_fields(kind).items():
        value = getattr(row, name)
        if _has_fields(hint):
            columns |= _to_columns(value, hint, f"{prefix}{name}.")
        elif isinstance(value, str):
            columns[f"{prefix}{name}"] = _as_text(value)
        elif isinstance(value, tuple):
            columns[f"{prefix}{name}"] = [_as_text(each) if isinstance(each, str) else each for each in value]
        else:
            columns[f"{prefix}{name}"] = value
    return columns


def _as_text(value: str) -> str:
    """Escape the bytes that are not text, which names of files and folders may contain."""
    return value.encode("utf-8", "backslashreplace").decode()


def _from_columns(columns: Mapping[str, Any], kind: type[Row], prefix: str = "") -> Row:
    values: dict[str, Any] = {}
    for name, hint in _list_fields(kind).items():
        if _has_fields(hint):
            values[name] = _from_columns(columns, hint, f"{prefix}{name}.")
        else:
            value = columns[f"{prefix}{name}"]
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
