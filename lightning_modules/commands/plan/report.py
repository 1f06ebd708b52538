"""A plan as text for a terminal."""

import textwrap
from collections.abc import Iterator
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
        columns = [name for name in content[0] if any(_text(row[name]) for row in content)]
        table = Table(columns, [[_text(row[name]) for name in columns] for row in content])
        yield textwrap.indent(as_text_table(table), indent)
    elif isinstance(content, list):
        for entry in content:
            yield _wrap(str(entry), indent)
    else:
        nested = {name: value for name, value in content.items() if isinstance(value, dict | list)}
        if texts := [f"{name} {text}" for name in content if name not in nested and (text := _text(content[name]))]:
            yield _wrap("; ".join(texts), indent)
        for name, value in nested.items():
            if value:
                yield f"{indent}{name}:"
                yield from _lines(value, f"{indent}  ")


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
