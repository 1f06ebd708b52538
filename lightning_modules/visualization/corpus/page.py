"""HTML page of the scores of a corpus: histograms by source, examples, and a slider for thresholds."""

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pyarrow
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from lightning_modules.scoring.corpus.shards import ScoreShards
from lightning_modules.visualization.corpus.summary import (
    Thresholds,
    examples,
    histogram,
    join_small_sources,
    thresholds,
    totals,
)
from lightning_modules.visualization.images import PANEL, STYLE, as_svg, curves_as_svg
from lightning_modules.visualization.report import (
    Block,
    Heading,
    Link,
    Picture,
    Table,
    Widget,
    as_html,
    read_resource,
)

PAGE = "_report.html"
"""Page in the folder of the scores; readers of parquet folders skip names with an underscore."""

INSPECTED = "_inspect-"
"""Prefix of the pages of documents, beside the page of their corpus."""

FIRST_WORDS = "first_words"
"""Column with the beginning of each document."""

NO_SOURCE = "-"
"""Source of documents without one."""

_METRICS = {
    "key_token_ratio": "key-token ratio",
    "benefit_mean": "mean LSD, nats",
    "lsd_mass": "LSD mass, nats",
    "tokens": "length, tokens",
}
_SQL = {name: name for name in _METRICS} | {"lsd_mass": "benefit_mean * compared_tokens"}  # of columns of the scores
_MEANS = ("key_token_ratio", "benefit_mean", "lsd_mass", "longppl", "perplexity")
_SCORES = [name for name in _MEANS if name != "lsd_mass"]
_COLUMNS = ("key", "file", "row", "error", "tokens", "compared_tokens", *_SCORES)
_EXAMPLES, _EXCERPT = 8, 60  # documents of each kind, and characters of their keys
_LEGEND = 24  # characters of a source
_NARROW = 30  # ratio of the ends of a logarithmic axis below which its labels are plain numbers
_SHOWN_THRESHOLDS = 9  # of each column, in a table

_INTRODUCTION = (
    "The long-short difference (LSD) of a token is its log-likelihood given the long context minus that given the short"
    " one, in nats. The LSD mass of a document is their sum over its tokens that have a short context. The outermost"
    " bins include the documents beyond them."
)
_SLIDER = """<p><label for="metric">Keep documents whose</label> <select id="metric">{}</select>
<label for="threshold">is above</label> <input type="range" id="threshold" min="0" max="1" step="1" value="0"></p>
<p><output id="kept" for="metric threshold" aria-live="polite">The slider needs JavaScript.</output></p>"""


def write_page(shards: ScoreShards, source_of_file: Callable[[str], str]) -> None:
    """Write `PAGE` into the folder of the scores.

    Sources are those of the column ``source``, if the corpus has one, or else of the files.
    """
    names = shards.schema().names
    own = ["source"] if "source" in names else []
    words = [FIRST_WORDS] if FIRST_WORDS in names else []  # scores of earlier versions lack them
    table = shards.table([*_COLUMNS, *own, *words, *(name for name in names if is_ladder_mean(name))])
    table = table.filter(table["error"].is_null())
    if not len(table):
        return
    documents = table.to_pandas()
    if own:
        documents["source"] = source_names(table["source"])
    else:
        files = documents["file"]
        documents["source"] = files.map({file: source_of_file(file) for file in files.unique()})
    folder = shards.folder.local or Path()
    shards.folder.write(PAGE, corpus_page(documents, shards.header(), str(shards.folder), folder=folder).encode())


def source_names(column: pyarrow.ChunkedArray) -> pd.Series:
    """Return the values of a column as text; those that are missing are `NO_SOURCE`."""
    return column.cast(pyarrow.string()).fill_null(NO_SOURCE).to_pandas()


def is_ladder_mean(column: str) -> bool:
    """Return whether a column has the mean benefits of a longer context over a shorter one."""
    return column.startswith("ladder_") and column.endswith("_mean")


def corpus_page(
    documents: pd.DataFrame, header: Mapping[str, Any], scores: str, *, folder: Path, conditions: str | None = None
) -> str:
    """Return the page; its size does not depend on the number of documents.

    Args:
        documents: Scores that are not failures, with the ``source`` of each document.
        header: Header of the shards (`ScoreShards.header`).
        scores: Folder of the scores, for the title.
        folder: Folder of the page. Example documents link to their page there (`INSPECTED`), if it exists, and
            otherwise show the command that makes it.
        conditions: SQL by which the documents were selected.
    """
    mass = documents["benefit_mean"] * documents["compared_tokens"]
    documents = documents.assign(source=join_small_sources(documents["source"]), lsd_mass=mass)
    by_source = totals(documents, _MEANS)
    total = by_source[["documents", "tokens"]].sum().astype(int).tolist()
    steps = {column: thresholds(documents, column) for column in _METRICS}
    selected = f" that meet `{conditions}`" if conditions else ""
    blocks: list[Block] = [f"{total[0]:,} documents{selected} with {total[1]:,} tokens.", _INTRODUCTION]
    pictures: dict[str, str] = {}

    blocks.append(Heading("Distributions"))
    for column, label in _METRICS.items():
        edges, counts = histogram(documents, column, log=column == "tokens")
        counts = {source: counts[source] for source in by_source.index if source in counts}  # the largest first
        pictures[column] = draw_histogram(edges, counts, label, log=column == "tokens")
        blocks.append(Picture(column, f"Documents by {label}{', sources stacked' if len(counts) > 1 else ''}"))
    blocks.append(_tabulate(by_source))
    if ladder := [name for name in documents if is_ladder_mean(name)]:
        # The mean benefit of each longer context over the shortest one.
        shortest = ladder[0].split("_")[1]
        names = {name: name.split("_")[2] for name in ladder if name.split("_")[1] == shortest}
        means = totals(documents, list(names))[list(names)].rename(columns=names)
        curves = ((_legend_text(str(source)), means.columns, values) for source, values in means.iterrows())
        pictures["ladder"] = curves_as_svg(curves, x="longer context, tokens", y="mean LSD, nats")
        caption = f"Mean LSD of longer contexts over one of {shortest} tokens, nats"
        blocks += [Heading("Context ladder"), Picture("ladder", caption), _tabulate(means)]

    options = "".join(f'<option value="{column}">{label}</option>' for column, label in _METRICS.items())
    blocks += [Heading("Thresholds"), Widget(_SLIDER.format(options)), _tabulate_thresholds(steps, total)]
    blocks.append(Heading("Examples"))
    for kind, rows in examples(documents, "benefit_mean", _EXAMPLES).items():
        blocks += [kind, *_tabulate_documents(rows, header, folder)]
    data = {"TOTAL": total, "THRESHOLDS": steps, "SQL": _SQL}
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in data.items())
    script = f"(() => {{\n'use strict';\n{constants}{read_resource('corpus/thresholds.js')}}})();"
    return as_html(f"Corpus {scores}", blocks, pictures, script=script)


def draw_histogram(
    edges: NDArray[np.float64], counts: Mapping[str, NDArray[np.int64]], label: str, *, log: bool = False
) -> str:
    """Return a histogram as SVG: the ``[N]`` documents of each source between ``[N + 1]`` edges, stacked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=PANEL, layout="constrained")
        plot = figure.subplots()
        plot.set(xlabel=label, ylabel="documents", xscale="log" if log else "linear")
        plot.yaxis.set_major_locator(MaxNLocator(integer=True))
        below = np.zeros(len(edges) - 1)
        for source, count in counts.items():
            plot.stairs(below + count, edges, baseline=below, fill=True, label=_legend_text(source))
            below = below + count
        if len(counts) > 1:
            figure.legend(loc="outside upper left", ncols=2)
        if log and edges[-1] / edges[0] < _NARROW:  # powers of ten would be one label or none
            whole = MaxNLocator(4, integer=True).tick_values(edges[0], edges[-1])
            ticks = [tick for tick in whole if edges[0] <= tick <= edges[-1]]
            plot.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
            plot.minorticks_off()
        return as_svg(figure)


def _legend_text(source: str) -> str:
    """Shorten the name of a source, and escape what matplotlib takes for a formula or for a label to leave out."""
    text = source if len(source) <= _LEGEND else f"…{source[1 - _LEGEND :]}"
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")


def _tabulate(means: pd.DataFrame) -> Table:
    """Make a table of numbers by source."""
    rows = [[str(source), *map(_format_number, row)] for source, *row in means.itertuples(name=None)]
    return Table(["source", *map(str, means.columns)], rows)


def _tabulate_thresholds(steps: Mapping[str, Thresholds], total: Sequence[int]) -> Table:
    rows = []
    for column, found in steps.items():
        for value, *kept in found[:: max(1, len(found) // _SHOWN_THRESHOLDS)]:
            fractions = [f"{count:,} ({count / max(whole, 1):.1%})" for count, whole in zip(kept, total, strict=True)]
            rows.append([f"`{_SQL[column]} > {value:g}`", *fractions])
    return Table(["condition", "documents", "tokens"], rows)


def _tabulate_documents(rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any], folder: Path) -> list[Table]:
    """Make a table of documents that link to their pages, and one of the commands that make missing pages."""
    columns = ["tokens", "key_token_ratio", "benefit_mean", "lsd_mass", "longppl"]
    cells, commands = [], []
    for row in rows:
        name = re.sub(r"[^\w.-]+", "_", row["file"])
        page = f"{INSPECTED}{name}-{row['row']}.html"
        key = f"{row['key'][:_EXCERPT]}…" if len(row["key"]) > _EXCERPT else row["key"]
        made = (folder / page).is_file()
        if not made:
            commands.append([key, f"`{inspect_command(row, header, folder / page)}`"])
        words = [row[FIRST_WORDS]] if FIRST_WORDS in row else []
        numbers = [_format_number(row[column]) for column in columns]
        cells.append([Link(key, page) if made else key, *words, row["source"], *numbers])
    names = ["document", *(["first words"] if rows and FIRST_WORDS in rows[0] else []), "source", *columns]
    tables = [Table(names, cells)]
    return [*tables, Table(["document", "command for its page"], commands, folded=True)] if commands else tables


def inspect_command(row: Mapping[str, Any], header: Mapping[str, Any], output: Path) -> str:
    """Return the command that makes the page of a document's key tokens, with the settings of its scores."""
    source, settings = header.get("source", {}), header.get("settings", {})
    words = ["longce", "inspect", find_file(source.get("files", []), row["file"])]
    if row["file"].endswith((".parquet", ".jsonl", ".json", ".gz", ".zst")):
        words += ["--row", str(row["row"]), "--text_column", source.get("text_column", "text")]
    words += ["--evaluator", header.get("model") or "MODEL"]
    for name in ("context_length", "stride", "max_tokens", "alpha", "beta"):
        words += [f"--{name}", str(settings[name])] if settings.get(name) is not None else []
    return shlex.join([*words, "--output", str(output)])


def find_file(searched: Sequence[str], name: str) -> str:
    """Return the path of a file of a corpus, which results name relative to the folder or pattern ``searched``."""
    paths = []
    for path in searched:
        folder = path.partition("*")[0].rpartition("/")[0] or "." if "*" in path else path.rstrip("/")
        paths.append(path if path == name or path.endswith(f"/{name}") else f"{folder}/{name}")
    return next((path for path in paths if os.path.exists(path)), (paths or [name])[0])


def _format_number(value: float | None) -> str:
    if value is None or np.isnan(value):
        return "nan"
    if isinstance(value, int | np.integer) or abs(value) >= 1e5:
        return f"{value:,.0f}"
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")
