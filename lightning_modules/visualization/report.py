"""Write reports with headings, text, tables and figures, as Markdown and as self-contained HTML."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import write_json

_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"-?[\d.,]*(%| [\[(±].*)?$")
_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="default-src '
    "'none'; img-src data:; style-src '{style_hash}'\"><title>{title}</title><style>{style}</style>"
)


class Heading(NamedTuple):
    """A heading of the second level."""

    text: str


class Table(NamedTuple):
    """Table of text cells."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A figure by its name."""

    name: str
    caption: str


Block = Heading | Table | Picture | str


def write_report(
    folder: Path,
    title: str,
    blocks: Sequence[Block],
    pictures: Mapping[str, str],
    numbers: Mapping[str, Any],
    *,
    name: str,
) -> None:
    """Write a report, its pictures (SVG text) and its numbers into a folder.

    The files are ``report.md``, ``report.html``, ``figures/*.svg`` and ``NAME.json``, where values that JSON does not
    support become null or text.
    """
    for picture, svg in pictures.items():
        write_atomically(folder / "figures" / f"{picture}.svg", svg.encode())
    write_json(folder / f"{name}.json", numbers)
    write_atomically(folder / "report.md", as_markdown(title, blocks).encode())
    write_atomically(folder / "report.html", as_html(title, blocks, pictures).encode())


def as_text_table(table: Table, *, left: Sequence[int] = (0,)) -> str:
    """Format a table for a terminal; the columns ``left`` are left-aligned, the others right-aligned."""
    rows = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    """Format a report as Markdown."""
    lines = [f"# {title}\n"]
    for block in blocks:
        match block:
            case Heading(text):
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
    cells = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)


def as_html(title: str, blocks: Sequence[Block], pictures: Mapping[str, str]) -> str:
    """Format a report as one HTML file with embedded figures, which loads nothing and runs no script."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{html.escape(text)}</h2>")
            case Table(head, rows):
                kinds = [_column_kind(column) for column in zip(head, *rows, strict=True)]
                body = "".join(f"<tr>{_format_cells(row, kinds, 'td')}</tr>" for row in rows)
                parts.append(
                    '<div class="wide" tabindex="0"><table>'
                    f"<tr>{_format_cells(head, kinds, 'th')}</tr>{body}</table></div>"
                )
            case Picture(name, caption):
                content = base64.b64encode(pictures[name].encode()).decode()
                image = f'<img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{content}">'
                parts.append(f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>")
            case text:
                parts.append(f"<p>{_format_inline(text)}</p>")
    style = read_resource("theme.css") + read_resource("report.css")
    head = _HEAD.format(style_hash=source_hash(style), title=html.escape(title), style=style)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def read_resource(name: str) -> str:
    """Read a file of this package, or of one below it."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def source_hash(source: str) -> str:
    """Return the hash by which a page's content security policy allows its script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _column_kind(column: Sequence[str]) -> str:
    """Return the style of a column: numbers are aligned to the right, and only long texts wrap."""
    return "number" if all(map(_NUMBER.match, column[1:])) else "short" if max(map(len, column)) < 32 else "long"


def _format_cells(row: Sequence[str], kinds: Sequence[str], tag: str) -> str:
    cells = zip(row, kinds, strict=True)
    return "".join(f'<{tag} class="{kind}">{_format_inline(cell)}</{tag}>' for cell, kind in cells)


def _format_inline(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", html.escape(text))
