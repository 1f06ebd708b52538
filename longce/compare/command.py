"""``longce compare``: final LongPPL, costs, differing settings and curves of several runs."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_modules.models.loading.provenance import Numerics, describe_numerics
from lightning_modules.tasks.evaluation.evaluator import EXPLANATION, evaluator_table
from lightning_modules.utilities.files import write_atomically
from lightning_modules.visualization.report import Block, Picture, Table, as_html, as_text_table
from longce.compare.evaluations import (
    ComparedEvaluation,
    describe_evaluations,
    draw_scores,
    judge_differences,
    subtract_scores,
    tabulate_scores,
)
from longce.compare.groups import group_runs
from longce.compare.page import make_page
from longce.compare.ratios import OF_ALL_TOKENS, OF_KEY_TOKENS, measure_ratios
from longce.compare.runs import ComparedRun, name_cells, read_compared
from longce.compare.tables import compare_settings, find_changed_documents, tabulate_costs, tabulate_numbers
from longce.compare.verdict import write_verdict

_WIDTH = 100  # of a cell and of sentences in a terminal


def compare(
    runs: Sequence[str | Path], output: str | Path | None = None, *, group_by: Sequence[str] | None = None
) -> str:
    """Return tables of the final numbers, the costs and the settings that differ; write a page that also has curves.

    Runs are read by `read_compared`, and compared with the first one; a single run with its own first evaluation. Runs
    with equal values of the settings ``group_by`` differ in their seeds, and are compared as a group.
    Folders of ``longce evaluate`` have one table, of their scores.
    """
    evaluations = []
    measured = []
    for each in read_compared(runs):
        if isinstance(each, ComparedEvaluation):
            evaluations.append(each)
        else:
            measured.append(each)
    if evaluations:
        if group_by:
            raise ValueError("`group_by` is for runs of `longce fit` and records of `longce score`.")
        return _compare_evaluations(evaluations, output)
    return compare_runs(measured, output, group_by=group_by)


def compare_runs(
    runs: Sequence[ComparedRun], output: str | Path | None = None, *, group_by: Sequence[str] | None = None
) -> str:
    """Compare runs or scored models, as `compare` does."""
    names, evaluators = name_cells(runs)
    compared = group_runs(runs, group_by) if group_by else list(runs)
    baseline, *others = compared
    if not others:
        others = [baseline]
        baseline = _find_first_evaluation(baseline)
    # 1. Ratios, of which the verdict has only those of key tokens and of all tokens.
    ratios = measure_ratios(others, baseline, names)
    main_kinds = (*OF_KEY_TOKENS, *OF_ALL_TOKENS)
    main = [ratio for ratio in ratios if ratio.kind in main_kinds and not math.isnan(ratio.value)]
    verdict = write_verdict([baseline, *others], baseline, main, names)
    verdict += describe_numerics(_list_numerics(runs))
    # 2. Tables.
    numbers = tabulate_numbers([baseline, *others], baseline, ratios, names)
    tables = {
        "Final numbers": numbers._replace(folded=False),
        "Cost": tabulate_costs(compared),
        "Settings that differ": compare_settings(compared),
    }
    texts = []
    if verdict:
        texts.append(_wrap(" ".join(verdict)))
    for heading, table in tables.items():
        if table.rows:
            rows = [list(map(_shorten, row)) for row in table.rows]
            texts.append(f"{heading}\n{as_text_table(Table(table.head, rows), left=range(len(table.head)))}\n")
    if evaluators:
        texts.append(_wrap(evaluators))
    # 3. The page.
    if output is not None:
        tables["Documents that changed most"] = find_changed_documents(others, baseline, names)
        page = make_page(runs, baseline.name, verdict, main, tables, evaluators, names)
        write_atomically(Path(output), page.encode())
        texts.append(f"Page: {output}\n")
    return "\n".join(texts or ["These runs have logged nothing yet.\n"])


def _list_numerics(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, Numerics]]:
    for run in runs:
        for cell in run.evaluations:
            yield run.name, cell.numerics


def _find_first_evaluation(run: ComparedRun) -> ComparedRun:
    """Return the numbers of a run before its training, or of its first evaluation."""
    step = min(map(min, run.evaluations.values()), default=0)
    first = {}
    for cell, steps in run.evaluations.items():
        if step in steps and len(steps) > 1:  # an evaluation of other precision may begin later
            first[cell] = {step: steps[step]}
    return ComparedRun(f"step {step}", first, {}, {})


def _compare_evaluations(found: Sequence[ComparedEvaluation], output: str | Path | None) -> str:
    baseline, *others = found
    differences = {}
    verdict = []
    for other in others:
        cells = subtract_scores(other, baseline)
        if cells:
            differences[other.name] = cells
            verdict.append(judge_differences(other.name, baseline.name, cells))
    table = tabulate_scores(found, differences)
    notes = describe_evaluations(found)
    blocks: list[Block] = []
    texts = []
    as_evaluator = {each.name: each.as_evaluator for each in found}
    if any(as_evaluator.values()):
        evaluators = evaluator_table(as_evaluator)
        blocks += [EXPLANATION, evaluators]
        texts += [as_text_table(evaluators, left=(0, 1)), "", _wrap(EXPLANATION)]
    if verdict:
        blocks += verdict
        texts.append(_wrap(" ".join(verdict)))
    if table.rows:
        texts += [as_text_table(table, left=(0, 1)), "", *notes]
    else:
        texts.append("No scores yet.")
    if output is not None:
        pictures = draw_scores(found)
        blocks += [Picture(name, f"Score by length: {name}") for name in pictures]
        page = as_html(f"Scores of {', '.join(each.name for each in found)}", [*blocks, table, *notes], pictures)
        write_atomically(Path(output), page.encode())
        texts.append(f"Page: {output}")
    return "\n".join(texts) + "\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text.replace("`", ""), _WIDTH) + "\n"


def _shorten(cell: str) -> str:
    """Return the end of a long cell, such as a path."""
    if len(cell) <= _WIDTH:
        return cell
    return f"…{cell[1 - _WIDTH :]}"
