"""A plan as text for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_modules.visualization.report import Table, as_text_table

WIDTH = 118


def report(plan: dict[str, Any]) -> str:
    """Return the plan section by section: lists of dictionaries as tables, all other numbers by their names."""
    lines: list[str] = []
    for name, content in plan.items():
        if content:
            lines += ["", name.upper(), *_lines(content)]
    return "\n".join(lines[1:])


def _lines(content: Any, indent: str = "  ") -> Iterator[str]:
    if isinstance(content, list) and isinstance(content[0], dict):
        yield from _table(content, indent)
    elif isinstance(content, list):
        for entry in content:
            yield from _wrap(str(entry), indent)
    else:
        single = {name: value for name, value in content.items() if not isinstance(value, dict | list)}
        if texts := [f"{name} {text}" for name, value in single.items() if (text := _text(value))]:
            yield from _wrap("; ".join(texts), indent)
        for name in (key for key in content if key not in single):
            if content[name]:
                yield f"{indent}{name}:"
                yield from _lines(content[name], f"{indent}  ")


def _table(rows: Sequence[dict[str, Any]], indent: str) -> Iterator[str]:
    columns = [name for name in rows[0] if any(_text(row[name]) for row in rows)]
    for line in as_text_table(Table(columns, [[_text(row[name]) for name in columns] for row in rows])).splitlines():
        yield f"{indent}{line}"


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
