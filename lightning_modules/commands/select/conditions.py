"""Read conditions on columns, such as ``key_token_ratio > 0.02 and tokens >= 32768``; nothing is evaluated as code."""

import operator
import re
from functools import reduce

import pyarrow
import pyarrow.compute as pc

_CONDITION = re.compile(r"""\s*([\w.]+)\s*(>=|<=|==|!=|>|<)\s*("[^"]*"|'[^']*'|[-+.\w]+)\s*(and\b|$)""", re.IGNORECASE)
_OPERATORS = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_FORM = "Write conditions as COLUMN > NUMBER, COLUMN == 'text' or COLUMN == true, joined by `and`; also <, >=, <=, !=."


def parse_conditions(text: str, schema: pyarrow.Schema) -> pyarrow.compute.Expression:
    """Parse conditions that are joined by ``and``.

    Args:
        text: The conditions.
        schema: Columns that may be compared.

    Returns:
        An expression that is true for rows that meet all conditions, and null or false for the others.

    Raises:
        ValueError: If the text cannot be read, names an unknown column, or compares one with a value of another type.

    Example:
        >>> str(parse_conditions("tokens >= 32768", pyarrow.schema({"tokens": pyarrow.int64()})))
        '(tokens >= 32768)'
    """
    conditions = []
    position, has_next = 0, True
    while has_next:
        match = _CONDITION.match(text, position)
        if match is None:
            raise ValueError(f"`where`: cannot read '{text[position:].strip()}'. {_FORM}")
        column, sign, value, conjunction = match.groups()
        conditions.append(_condition(column, sign, _parse_value(value), schema))
        position, has_next = match.end(), bool(conjunction)
    return reduce(operator.and_, conditions)


def _condition(column: str, sign: str, value: float | str | bool, schema: pyarrow.Schema) -> pyarrow.compute.Expression:
    if column not in schema.names:
        raise ValueError(f"`where`: the scores have no column '{column}', only {schema.names}.")
    kind = schema.field(column).type
    if type(value) is not _comparable_type(kind):
        raise ValueError(f"`where`: column '{column}' is of type {kind}: it cannot be {sign} {value!r}.")
    field = pc.field(column)
    if isinstance(value, str):
        field = field.cast(pyarrow.string())  # Arrow has several types of text
    return _OPERATORS[sign](field, pc.scalar(value))


def _parse_value(text: str) -> float | str | bool:
    if text[0] in "\"'":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"`where`: '{text}' is not a number. {_FORM}") from error


def _comparable_type(kind: pyarrow.DataType) -> type | None:
    """Return the type of values that a column is compared with; None for lists and the like."""
    kinds = pyarrow.types
    if kinds.is_integer(kind) or kinds.is_floating(kind):
        return float
    text = kind.value_type if kinds.is_dictionary(kind) else kind
    if kinds.is_string(text) or kinds.is_large_string(text) or kinds.is_string_view(text):
        return str
    return bool if kinds.is_boolean(kind) else None
