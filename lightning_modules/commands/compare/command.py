"""``longce compare``: final LongPPL, costs, differing settings and curves of several runs."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from lightning_modules.commands.compare.curves import AXES, draw_curves
from lightning_modules.commands.compare.differences import corpus_perplexities, perplexity_ratio, shared_documents
from lightning_modules.commands.compare.runs import Cell, Run, read_runs
from lightning_modules.utilities.errors import did_you_mean
from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_html, as_text_table

_KINDS = {"LongPPL": ("longppl", "key_tokens"), "perplexity": ("perplexity", "tokens")}
_EXPLANATION = (
    "LongPPL and perplexity are over all tokens of a set. Ratios are over the documents that both runs have with equal"
    " numbers of tokens and key tokens; below 1 is better. Their 95% intervals are of a bootstrap over documents: they"
    " are about the choice of documents, not about the noise of training, and too narrow for few documents (in"
    " simulations they covered 84% with 5 documents, 92% with 16)."
)
_WIDTH = 50  # of a cell in a terminal
_CHANGED = 10  # documents that changed most


def compare(runs: Sequence[str | Path], output: str | Path | None = None, *, baseline: str | None = None) -> str:
    """Compare runs of ``longce fit``, or results of ``longce score``; options of ``longce compare``.

    Returns tables of the final numbers, the costs and the settings that differ, and writes ``output``, an HTML page
    that also has curves. A single run is compared with its own first evaluation.

    Raises:
        ValueError: If a path is not a run or a result, or if no run has the name ``baseline``.
    """
    found = read_runs(runs)
    reference = _find_baseline(found, baseline)
    ranked = _rank_runs(found if len(found) > 1 else [reference, *found], reference)
    tables = {"Final numbers": ranked, "Cost": _tabulate_costs(found), "Settings that differ": _compare_settings(found)}
    shown = {heading: table for heading, table in tables.items() if table.rows}
    texts = []
    for heading, table in shown.items():
        rows = [[cell if len(cell) <= _WIDTH else f"{cell[: _WIDTH - 1]}…" for cell in row] for row in table.rows]
        texts.append(f"{heading}\n{as_text_table(Table(table.head, rows), left=range(len(table.head)))}\n")
    if output is not None:
        _write_html(Path(output), found, reference, shown)
        texts.append(f"Page: {output}\n")
    return "\n".join(texts)


def write_page(runs: Sequence[Path], output: Path) -> None:
    """Write an HTML page about one run, or about several."""
    compare(runs, output)


def _write_html(output: Path, runs: Sequence[Run], baseline: Run, tables: dict[str, Table]) -> None:
    blocks: list[Block] = []
    for heading, table in tables.items():
        blocks += [Heading(heading), table]
        if heading == "Final numbers":
            blocks.append(_EXPLANATION)
    changed = _find_changed_documents(runs, baseline)
    if changed.rows:
        blocks += [Heading("Documents that changed most"), changed]
    pictures: dict[str, str] = {}
    for axis in AXES:
        curves = {f"{title} by {axis}": svg for title, svg in draw_curves(runs, axis).items()}
        blocks += [Heading(f"Curves by {axis}"), *(Picture(title, title) for title in curves)] if curves else []
        pictures |= curves
    names = ", ".join(run.name for run in runs)
    title = f"Comparison of {names}" if len(runs) > 1 else f"Run {names}"
    write_atomically(output, as_html(title, blocks, pictures).encode())


def _find_baseline(runs: Sequence[Run], name: str | None) -> Run:
    """Return the run with this name, by default the first; of a single run its first evaluation."""
    names = [run.name for run in runs]
    if name is not None and name not in names:
        raise ValueError(f"No run has the name of the `baseline`, '{name}'. {did_you_mean(name, names)}")
    if len(runs) > 1:
        return runs[0 if name is None else names.index(name)]
    first = {cell: dict([min(steps.items())]) for cell, steps in runs[0].evaluations.items() if len(steps) > 1}
    return Run(f"step {min(map(min, first.values()), default=0)}", first, {}, {})


def _rank_runs(runs: Sequence[Run], baseline: Run) -> Table:
    """Return the last evaluation of each run, best first for each cell."""
    head = ["set", "evaluator", "thresholds", "run", "step", "documents"]
    head += [text for kind in _KINDS for text in (kind, f"{kind} / {baseline.name}'s")]
    cells = []
    for cell in dict.fromkeys(cell for run in runs for cell in run.evaluations):
        ranked = []
        for run in (run for run in runs if cell in run.evaluations):
            step, documents = _last(run, cell)
            numbers = corpus_perplexities(documents)
            ratios, note = _compare(documents, cell, baseline) if run is not baseline else (["", ""], "")
            texts = [text for pair in zip(map(_format_number, numbers), ratios, strict=True) for text in pair]
            order = [bool(note), *(value if math.isfinite(value) else math.inf for value in numbers)]
            ranked.append(
                (order, [*_describe(cell, documents), run.name, str(step), str(len(documents)), *texts, note])
            )
        ranked.sort(key=lambda each: each[0])
        if len(ranked) > 1 and not ranked[1][0][0]:
            ranked[0][1][3] += " (best)"
        cells += [row if number == 0 else ["", "", "", *row[3:]] for number, (_, row) in enumerate(ranked)]
    return _drop_empty_columns([*head, "note"], cells)


def _last(run: Run, cell: Cell) -> tuple[int, pd.DataFrame]:
    return max(run.evaluations[cell].items(), key=lambda each: each[0])


def _describe(cell: Cell, documents: pd.DataFrame) -> list[str]:
    """Return texts for the set, the evaluator and the thresholds (alpha, beta)."""
    settings = documents.attrs
    values = f"({settings['alpha']:g}, {settings['beta']:g})" if "alpha" in settings else ""
    evaluator = cell.evaluator or Path(settings.get("evaluator", "")).name
    return [cell.set, evaluator, f"{cell.thresholds} {values}".strip()]


def _compare(documents: pd.DataFrame, cell: Cell, baseline: Run) -> tuple[list[str], str]:
    """Return the ratios of LongPPL and perplexity to the baseline, and why not all documents can be compared."""
    if cell not in baseline.evaluations:
        return ["", ""], f"not in {baseline.name}"
    other = _last(baseline, cell)[1]
    differing = [key for key in {**documents.attrs, **other.attrs} if documents.attrs.get(key) != other.attrs.get(key)]
    if differing:
        values = (f"{key} {documents.attrs.get(key)} instead of {other.attrs.get(key)}" for key in differing)
        return ["", ""], f"not comparable: {', '.join(values)}"
    both = shared_documents(documents, other)
    ratios = [
        str(perplexity_ratio(*(both[name].to_numpy() for name in (kind, f"{kind}_baseline", tokens))))
        for kind, tokens in _KINDS.values()
    ]
    count = max(len(documents), len(other))
    return ratios, f"ratio over {len(both)} of {count} documents" if len(both) < count else ""


def _tabulate_costs(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        steps = max(run.scalars.get("train/loss", {}), default=0)
        tokens, hours = (
            max(run.scalars.get(key, {}).values(), default=0) for key in ("train/tokens", "train/gpu_hours")
        )
        values = f"{steps:,}", f"{tokens:,.0f}", f"{hours:.3g}", run.config.get("parameters", "")
        rows.append([run.name, *("" if value == "0" else value for value in values)])
    table = _drop_empty_columns(["run", "optimizer steps", "tokens", "GPU hours", "parameters"], rows)
    return table if len(table.head) > 1 else Table([], [])


def _compare_settings(runs: Sequence[Run]) -> Table:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [[key, *(run.config.get(key, "") for run in runs)] for key in keys]
    return Table(["setting", *(run.name for run in runs)], [row for row in rows if len({*row[1:]}) > 1])


def _find_changed_documents(runs: Sequence[Run], baseline: Run) -> Table:
    """Return the documents whose LongPPL differs most from the baseline's."""
    found = []
    for run in (run for run in runs if run is not baseline):
        for cell in (cell for cell in run.evaluations if cell in baseline.evaluations):
            both = shared_documents(_last(run, cell)[1], _last(baseline, cell)[1]).query("key_tokens > 0")
            for (name, _), each in both.iterrows():
                numbers = each["longppl_baseline"], each["longppl"], each["longppl"] / each["longppl_baseline"]
                found.append((abs(math.log(numbers[2])), [*cell, run.name, name, *map(_format_number, numbers)]))
    found.sort(key=lambda each: -each[0])
    head = ["set", "evaluator", "thresholds", "run", "document", f"LongPPL of {baseline.name}", "LongPPL", "ratio"]
    return _drop_empty_columns(head, [cells for _, cells in found[:_CHANGED]])


def _drop_empty_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    kept = [number for number in range(len(head)) if any(row[number] for row in rows)]
    return Table([head[number] for number in kept], [[row[number] for number in kept] for row in rows])


def _format_number(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞"
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}"
