"""Tables of a comparison: final numbers, costs, differing settings, and the documents that changed most."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_modules.utilities.identity import shorten_hashes
from lightning_modules.utilities.statistics import TOKENS, corpus_mean
from lightning_modules.visualization.report import Table
from longce.compare.ratios import NAMES, Ratio, compared_kinds, format_number, shared_documents
from longce.compare.runs import AXES, Cell, ComparedRun, has_documents, list_cells

_CHANGED = 10  # documents that changed most
_CELL = "set, evaluator, thresholds"


def tabulate_numbers(
    runs: Sequence[ComparedRun], baseline: ComparedRun, ratios: Sequence[Ratio], names: Mapping[Cell, str]
) -> Table:
    """Return the last evaluation of each run by cell, the best one first, those that have other documents last."""
    head = [_CELL, "run"]
    for name in NAMES.values():
        head += [name, f"{name} / {baseline.name}'s"]
    ratios_by_run: dict[tuple[Cell, str], dict[str, Ratio]] = defaultdict(dict)
    for ratio in ratios:
        ratios_by_run[ratio.cell, ratio.run][ratio.kind] = ratio
    rows = []
    for cell in sorted(list_cells(runs), key=lambda each: names[each]):
        evaluated = [run for run in runs if cell in run.evaluations]
        compared = compared_kinds([run.last(cell)[1] for run in evaluated])
        ranked = [_tabulate_run(run, cell, compared, ratios_by_run[cell, run.name]) for run in evaluated]
        label = names[cell]
        for _, row in sorted(ranked):
            rows.append([label, *row])
            label = ""  # only in the first of its rows
    return _drop_empty_columns([*head, "step", "documents", "note"], rows)


def _tabulate_run(
    run: ComparedRun, cell: Cell, compared: Sequence[str], ratios: Mapping[str, Ratio]
) -> tuple[list[float], list[str]]:
    """Return numbers by which runs are ranked, and the row of a run."""
    step, documents = run.last(cell)
    values = {kind: corpus_mean(documents, kind) for kind in (*TOKENS, "longppl_soft", *compared)}
    row = [run.name]
    for kind in NAMES:
        row += [format_number(values.get(kind, math.nan)), str(ratios.get(kind, ""))]
    if compared[0] == "longppl" and not documents["key_tokens"].sum():
        row[1] = "no key tokens"
    ratio = ratios.get(compared[0])
    is_partial = False
    note = ""
    if ratio is not None and ratio.shared < ratio.total:
        is_partial = True
        note = f"ratio over {ratio.shared} of {ratio.total} documents"
    count = str(len(documents))
    if not has_documents(documents):
        count = ""
        note = "no records by document, so no intervals"
    rank = [math.inf if math.isnan(values[kind]) else values[kind] for kind in compared]
    return [is_partial, *rank], [*row, str(step or ""), count, note]


def tabulate_costs(runs: Sequence[ComparedRun]) -> Table:
    """Return the optimizer steps, tokens and device hours of trained runs, and their numbers of parameters."""
    rows = []
    for run in runs:
        row = [run.name]
        for scalar in AXES.values():
            values = run.scalars.get(scalar)
            row.append(format_amount(max(values.values())) if values else "")
        parameters = run.config.get("run.parameters")
        row.append(f"{int(parameters):,}" if parameters else "")
        rows.append(row)
    head = ["run", *AXES, "parameters"]
    if not any(run.scalars.get("step") for run in runs):
        return Table(head, [])
    return _drop_empty_columns(head, rows)


def compare_settings(runs: Sequence[ComparedRun]) -> Table:
    """Return the settings that differ, with a column for each run; without those of a class that a run lacks."""
    configs = {run.name: run.config for run in runs if run.config}
    rows: list[list[str]] = []
    absent: list[str] = []  # prefixes of settings of a class that a run lacks, such as a callback
    for key in sorted(set().union(*configs.values())):
        values = [config.get(key, "") for config in configs.values()]
        if len(set(values)) > 1 and not key.startswith(tuple(absent)):
            rows.append([key, *map(shorten_hashes, values)])
            if "" in values:
                absent.append(f"{key}.")
    return Table(["setting", *configs], rows)


def find_changed_documents(runs: Sequence[ComparedRun], baseline: ComparedRun, names: Mapping[Cell, str]) -> Table:
    """Return the documents whose LongPPL changed most, by its ratio."""
    found = []
    for run in runs:
        for cell in run.evaluations.keys() & baseline.evaluations.keys():
            shared = shared_documents(run.last(cell)[1], baseline.last(cell)[1])
            if not has_documents(shared):
                continue
            numbers_of_both = shared[["document", "longppl", "longppl_baseline"]].dropna()
            for document, own, other in numbers_of_both.itertuples(index=False, name=None):
                change = 0.0
                if own != other:  # both may be infinite
                    change = abs(math.log(own) - math.log(other))
                numbers = map(format_number, (other, own, own / other))
                found.append((-change, [names[cell], run.name, document, *numbers]))
    head = [_CELL, "run", "document", f"LongPPL of {baseline.name}", "LongPPL", "ratio"]
    return _drop_empty_columns(head, [row for _, row in sorted(found)[:_CHANGED]])


def format_amount(value: float) -> str:
    """Return an amount of steps, tokens or hours."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _drop_empty_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    if not rows:
        return Table(head, rows)
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    kept_head, *kept_rows = zip(*columns, strict=True)
    return Table(kept_head, kept_rows)
