"""Conditions on columns, such as ``key_token_ratio > 0.02 and tokens >= 32768``: read, never evaluated as code."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow
import pyarrow.compute

_VALUE = r"""("[^"]*"|'[^']*'|(?:true|false)\b|[-+]?[\d.]+(?:[eE][-+]?\d+)?)"""
_CONDITION = re.compile(rf"\s*([\w.]+)\s*(>=|<=|==|!=|>|<)\s*{_VALUE}\s*")
_AND = re.compile(r"and\b", re.IGNORECASE)
_FUNCTIONS = {
    ">": pyarrow.compute.greater,
    "<": pyarrow.compute.less,
    ">=": pyarrow.compute.greater_equal,
    "<=": pyarrow.compute.less_equal,
    "==": pyarrow.compute.equal,
    "!=": pyarrow.compute.not_equal,
}
_FORM = "Write conditions as COLUMN > NUMBER, COLUMN == 'text' or COLUMN == true, joined by `and`; also <, >=, <=, !=."


class Condition(NamedTuple):
    """One comparison of a column with a value."""

    column: str
    operator: str
    value: float | str | bool


def parse_conditions(text: str) -> list[Condition]:
    """Read conditions that are joined by ``and``.

    Raises:
        ValueError: Naming what is none.

    Example:
        >>> [tuple(condition) for condition in parse_conditions("tokens >= 32768 and source == 'arxiv'")]
        [('tokens', '>=', 32768.0), ('source', '==', 'arxiv')]
    """
    return list(_conditions(text))


def _conditions(text: str) -> Iterator[Condition]:
    position = 0
    while True:
        found = _CONDITION.match(text, position)
        if found is None:
            raise ValueError(f"`where`: no condition in '{text[position:].strip()}'. {_FORM}")
        column, operator, value = found.groups()
        yield Condition(column, operator, _value(value))
        if (position := found.end()) == len(text):
            return
        joint = _AND.match(text, position)
        if joint is None:
            raise ValueError(f"`where`: expected `and` before '{text[position:].strip()}'. {_FORM}")
        position = joint.end()


def _value(text: str) -> float | str | bool:
    if text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"`where`: '{text}' is no number. {_FORM}") from error


def check_conditions(conditions: Sequence[Condition], schema: pyarrow.Schema) -> None:
    """Raise a ``ValueError`` for a column that is not there, or a comparison with a value of another type."""
    for column, operator, value in conditions:
        if column not in schema.names:
            raise ValueError(f"`where`: the scores have no column '{column}', only {schema.names}.")
        kind = schema.field(column).type
        if type(value) is not _compared_as(kind):
            raise ValueError(f"`where`: column '{column}' is of type {kind}: it cannot be {operator} {value!r}.")


def _compared_as(kind: pyarrow.DataType) -> type | None:
    """What values of a column are compared with; None if with nothing, such as lists."""
    kinds = pyarrow.types
    if kinds.is_integer(kind) or kinds.is_floating(kind):
        return float
    text = kind.value_type if kinds.is_dictionary(kind) else kind
    if kinds.is_string(text) or kinds.is_large_string(text) or kinds.is_string_view(text):
        return str
    return bool if kinds.is_boolean(kind) else None


def passing(batch: pyarrow.RecordBatch, conditions: Sequence[Condition]) -> pyarrow.BooleanArray:
    """Which rows meet all conditions; a null meets none, and a document that has failed does not pass."""
    mask = pyarrow.compute.is_null(batch.column("error"))
    for column, operator, value in conditions:
        values = batch.column(column)
        values = values.cast(pyarrow.string()) if isinstance(value, str) else values  # of which there are many kinds
        met = _FUNCTIONS[operator](values, pyarrow.scalar(value))
        mask = pyarrow.compute.and_(mask, met.fill_null(False))
    return mask
