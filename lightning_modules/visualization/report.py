"""Write reports with headings, text, tables and figures, as Markdown and as self-contained HTML."""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from lightning_modules.utilities.files import write_atomically

MAX_ROWS, MAX_FIGURES = 12, 6
"""Rows of a table, and figures in a row, that a page shows without a click."""

_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"[-+]?[\d.,]*(e[+-]?\d+)?(%| [\[(±].*)?$|-?[—∞]$")
_ABSENT = {"nan": "—", "None": "—", "null": "—", "inf": "∞", "-inf": "-∞"}

Tone = Literal["good", "bad", "open"]


class Heading(NamedTuple):
    """A second-level heading, which the table of contents links to; a page may fold its section."""

    text: str
    folded: bool = False


class Table(NamedTuple):
    """Table of text cells.

    A page shows the cells that ``badges`` names as badges, and a ``folded`` table only on a click; by default, one of
    more than `MAX_ROWS` rows.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    badges: Mapping[str, Tone] = {}
    folded: bool | None = None


class Picture(NamedTuple):
    """A figure by its name."""

    name: str
    caption: str


Block = Heading | Table | Picture | str


def write_report(folder: Path, title: str, blocks: Sequence[Block], pictures: Mapping[str, str]) -> None:
    """Write a report and its pictures (SVG text): ``report.md``, ``report.html`` and ``figures/*.svg`` in a folder."""
    for picture, svg in pictures.items():
        write_atomically(folder / "figures" / f"{picture}.svg", svg.encode())
    write_atomically(folder / "report.md", as_markdown(title, blocks).encode())
    write_atomically(folder / "report.html", as_html(title, blocks, pictures).encode())


def as_text_table(table: Table, *, left: Sequence[int] = (0,)) -> str:
    """Format a table for a terminal; the columns ``left`` are left-aligned, the others right-aligned."""
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = list(map(str.rjust, row, widths))
        for number in left:
            padded[number] = row[number].ljust(widths[number])
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def format_estimate(value: float, interval: tuple[float, float] | None, spec: str, ends: str) -> str:
    """Return a value with its interval, such as ``84.2 [80, 88]`` if ``spec`` is ``.1f`` and ``ends`` is ``.0f``.

    Empty for NaN; the value alone if the interval is unknown.
    """
    if math.isnan(value):
        return ""
    if interval is None:
        return f"{value:{spec}}"
    low, high = interval
    return f"{value:{spec}} [{low:{ends}}, {high:{ends}}]"


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    """Format a report as Markdown."""
    lines = [f"# {title}\n"]
    for block in blocks:
        match block:
            case Heading(text, _):
                lines.append(f"## {text}\n")
            case Table():
                lines.append(f"{as_markdown_table(block)}\n")
            case Picture(name, caption):
                lines.append(f"![{caption}](figures/{name}.svg)\n\n{caption}\n")
            case text:
                lines.append(f"{text}\n")
    return "\n".join(lines)


def as_markdown_table(table: Table) -> str:
    """Format a table as Markdown."""
    lines = []
    for row in (table.head, ["---"] * len(table.head), *table.rows):
        cells = " | ".join(map(_format_markdown_cell, row))
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def as_html(title: str, blocks: Sequence[Block], pictures: Mapping[str, str]) -> str:
    """Format a report as one HTML file with embedded figures, which loads and runs nothing."""
    sections: list[tuple[Heading, list[Block]]] = [(Heading(""), [])]
    for block in blocks:
        if isinstance(block, Heading):
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    style = read_resource("theme.css")
    return render("report.html", title=title, sections=sections, pictures=pictures, style=style)


def render(template: str, **values: Any) -> str:
    """Fill a template of this package; everything is escaped unless the template marks it safe."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FunctionLoader(read_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
        "column_kinds": _column_kinds,
        "groupby_kind": lambda blocks: groupby(blocks, key=lambda block: type(block).__name__),
        "inline": _format_inline,
        "present": _replace_absent,
        "source_hash": source_hash,
        "split_figures": _split_figures,
    }
    found.tests["folded"] = _is_folded
    return found


def read_resource(name: str) -> str:
    """Read a file of this package, or of one below it."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def source_hash(source: str) -> str:
    """Return the hash by which a page's content security policy allows its script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _column_kinds(table: Table) -> list[str]:
    """Return the style of each column: numbers are aligned to the right, and only long texts wrap."""
    kinds = []
    for head, *column in zip(table.head, *table.rows, strict=True):
        cells = list(map(_replace_absent, column))
        if all(map(_NUMBER.match, cells)):
            kinds.append("number")
        elif max(map(len, [head, *cells])) < 32:
            kinds.append("short")
        else:
            kinds.append("long")
    return kinds


def _is_folded(table: Table) -> bool:
    if table.folded is None:
        return len(table.rows) > MAX_ROWS
    return table.folded


def _split_figures(figures: Iterable[Picture]) -> list[list[Picture]]:
    """Return the figures that are shown, and those that are folded if there are many."""
    found = list(figures)
    return list(filter(None, (found[:MAX_FIGURES], found[MAX_FIGURES:])))


def _replace_absent(cell: str) -> str:
    """Return a cell, with a dash for a missing number."""
    return _ABSENT.get(cell, cell)


def _format_markdown_cell(cell: str) -> str:
    return _replace_absent(cell).replace("|", r"\|")


def _format_inline(text: str) -> Markup:
    """Escape a text, in which backticks enclose code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))
