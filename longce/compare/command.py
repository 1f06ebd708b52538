"""``longce compare``: final LongPPL, costs, differing settings and curves of several runs."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.tasks.evaluation.evaluator import EXPLANATION, evaluator_table
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.statistics import TOKENS, UNITS, corpus_mean, paired_ratio
from lightning_modules.visualization.images import curves_as_svg
from lightning_modules.visualization.report import Block, Heading, Picture, Table, Tone, as_html, as_text_table
from longce.compare.evaluations import (
    ComparedEvaluation,
    draw_scores,
    judge_evaluations,
    tabulate_evaluations,
)
from longce.compare.groups import group_runs
from longce.compare.numerics import separate_numerics
from longce.compare.ratios import compared_kinds, shared_documents
from longce.compare.runs import AXES, Cell, ComparedRun, has_documents, read_compared
from longce.compare.verdict import Ratio, draw_ratios, drawn_ratios, measure_ratios, write_verdict

_EXPLANATION = (
    "LongPPL is the perplexity over key tokens, which the evaluator predicts much better with the long context (by more"
    " than alpha nats) than with a short one, and well (above beta); perplexity is over all tokens, and soft LongPPL"
    " weights them by the evaluator's soft influence. K and d are the length of the shortest short context and the"
    " number of tokens that share one. Ratios are over the documents that both runs have with equal numbers of tokens"
    " and key tokens; below 1 is better. The 95% intervals are about the choice of documents, not about the noise of"
    " training."
)
_OTHER_TOKENS = (
    "Models with different tokenizers have different tokens, and are compared by numbers that do not depend on them:"
    " bits per byte of the text and of its key spans, and LongPPL per token of the evaluator."
)
_TITLES = {
    "longppl": "LongPPL",
    "longppl_per_evaluator_token": "LongPPL per evaluator token",
    "key_bits_per_byte": "key bits/byte",
    "longppl_soft": "soft LongPPL",
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
}
FINAL = "Final numbers"
_RATIOS_CAPTION = (
    "Numbers of the last evaluations of {} over those of {}, the baseline, with 95% intervals. Left of the line is"
    " better; a filled dot has an interval that excludes a tie."
)
_WIDTH = 100  # of a cell and of the verdict in a terminal
_CHANGED = 10  # documents that changed most
_POINTS = 200  # of a curve; longer ones are averaged


def compare(
    runs: Sequence[str | Path], output: str | Path | None = None, *, group_by: Sequence[str] | None = None
) -> str:
    """Return tables of the final numbers, the costs and the settings that differ; write a page that also has curves.

    Runs are read by `read_compared`, and compared with the first one; a single run with its own first evaluation. Runs
    with equal values of the settings ``group_by`` differ in their seeds, and are compared as a group.
    Folders of ``longce evaluate`` have one table, of their scores.
    """
    found = read_compared(runs)
    if evaluations := [each for each in found if isinstance(each, ComparedEvaluation)]:
        if group_by:
            raise ValueError("`group_by` is for runs of `longce fit` and records of `longce score`.")
        return _compare_evaluations(evaluations, output)
    return compare_runs([each for each in found if isinstance(each, ComparedRun)], output, group_by=group_by)


def _compare_evaluations(found: Sequence[ComparedEvaluation], output: str | Path | None) -> str:
    table, notes = tabulate_evaluations(found)
    verdict = judge_evaluations(found)
    texts = [as_text_table(table, left=(0, 1)), "", *notes] if table.rows else ["No scores yet."]
    if verdict:
        texts = [textwrap.fill(" ".join(verdict).replace("`", ""), _WIDTH), "", *texts]
    accuracies: list[Block] = []
    if any(each.as_evaluator for each in found):
        evaluators = evaluator_table({each.name: each.as_evaluator for each in found})
        accuracies = [EXPLANATION, evaluators]
        texts = [as_text_table(evaluators, left=(0, 1)), "", textwrap.fill(EXPLANATION, _WIDTH), "", *texts]
    if output is not None:
        title = f"Scores of {', '.join(each.name for each in found)}"
        pictures = draw_scores(found)
        blocks: list[Block] = [
            *accuracies,
            *verdict,
            *(
                Picture(name, f"{'Average score' if name == 'average' else f'Score of {name}'}, with 95% intervals")
                for name in pictures
            ),
            table,
            *notes,
        ]
        write_atomically(Path(output), as_html(title, blocks, pictures).encode())
        texts.append(f"Page: {output}")
    return "\n".join(texts) + "\n"


def compare_runs(
    found: Sequence[ComparedRun], output: str | Path | None = None, *, group_by: Sequence[str] | None = None
) -> str:
    """Compare runs or scored models, as `compare` does."""
    found, sentences = separate_numerics(found)
    found, evaluators = _shorten_cells(found)
    single = found
    if group_by:
        found = group_runs(found, group_by)
    baseline, *others = found if len(found) > 1 else [_first_evaluation(found[0]), *found]
    tables = {
        FINAL: _rank_runs([baseline, *others], baseline)._replace(folded=False),
        "Cost": _tabulate_costs(found),
        "Settings that differ": _compare_settings(found),
    }
    verdict = write_verdict([baseline, *others], baseline, tables["Settings that differ"].rows) + sentences
    texts = [f"{textwrap.fill(' '.join(verdict).replace('`', ''), _WIDTH)}\n"] if verdict else []
    for heading, table in tables.items():
        short = [[cell if len(cell) <= _WIDTH else f"…{cell[1 - _WIDTH :]}" for cell in row] for row in table.rows]
        left = range(len(table.head))
        texts += [f"{heading}\n{as_text_table(Table(table.head, short), left=left)}\n"] if short else []
        texts += [f"{textwrap.fill(evaluators, _WIDTH)}\n"] if evaluators and heading == FINAL else []
    if output is not None:
        ratios = measure_ratios(others, baseline)
        names = {"evaluators": evaluators, "baseline": baseline.name}
        tables |= _find_changed_documents(others, baseline)
        write_atomically(Path(output), _make_page(single, verdict, ratios, tables, **names).encode())
        texts.append(f"Page: {output}\n")
    return "\n".join(texts or ["These runs have logged nothing yet.\n"])


def _shorten_cells(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], str]:
    """Return runs with short names of their evaluations, and a sentence that identifies the evaluators.

    Names stay long if two evaluators of the same name differ in a part that would be omitted, such as K or the dtype.
    """
    cells = list(dict.fromkeys(cell for run in runs for cell in run.evaluations))
    judges = list(dict.fromkeys(cell.judge for cell in cells if cell.details))
    names = {cell.evaluator for cell in cells if cell.details}
    if not judges or len(names) < len(judges) or len({cell.short for cell in cells}) < len(cells):
        return list(runs), ""
    renamed = []
    for run in runs:
        short = {cell._replace(details=""): steps for cell, steps in run.evaluations.items()}
        renamed.append(run._replace(evaluations=short))
    return renamed, f"Evaluator{'s' * (len(judges) > 1)}: {'; '.join(judges)}."


def _first_evaluation(run: ComparedRun) -> ComparedRun:
    step = min((min(steps) for steps in run.evaluations.values()), default=0)
    # An evaluation of other precision may begin later.
    first = {cell: {step: steps[step]} for cell, steps in run.evaluations.items() if step in steps and len(steps) > 1}
    return ComparedRun(f"step {step}", first, {}, {})


def _make_page(
    runs: Sequence[ComparedRun],
    verdict: Sequence[str],
    ratios: Sequence[Ratio],
    tables: Mapping[str, Table],
    *,
    evaluators: str,
    baseline: str,
) -> str:
    """Return the page: the verdict and its picture, the tables, the evaluators, and curves over each axis."""
    blocks: list[Block] = [*verdict]
    pictures: dict[str, str] = {}
    if drawn := drawn_ratios(ratios):
        pictures["ratios"] = draw_ratios(drawn)
        named = ", ".join(dict.fromkeys(ratio.run for ratio in drawn))
        blocks.append(Picture("ratios", _RATIOS_CAPTION.format(named, baseline)))
    for heading, table in tables.items():
        blocks += [Heading(heading), table] if table.rows else []
        if heading == FINAL and table.rows:
            other = _OTHER_TOKENS if _TITLES["key_bits_per_byte"] in table.head else ""
            blocks += [each for each in (evaluators, _EXPLANATION, other) if each]
    for axis in AXES:
        figures = {f"{axis}, {title}": (title, svg) for title, svg in draw_curves(runs, axis).items()}
        pictures |= {name: svg for name, (_, svg) in figures.items()}
        curves = [Picture(name, title) for name, (title, _) in figures.items()]
        # The first axis is enough to begin with: the others show the same values.
        shown = any(isinstance(block, Heading) and block.text.startswith("Curves") for block in blocks)
        blocks += [Heading(f"Curves by {axis}", folded=shown), *curves] if curves else []
    return as_html(f"{'Runs' if len(runs) > 1 else 'Run'} {', '.join(run.name for run in runs)}", blocks, pictures)


def draw_curves(runs: Sequence[ComparedRun], axis: str) -> dict[str, str]:
    """Return figures as SVG by title: LongPPL, perplexity, loss and learning rate of the runs that logged the axis."""
    curves = {run.name: _find_curves(run) if AXES[axis] in run.scalars else {} for run in runs}
    figures = {}
    for title in dict.fromkeys(title for own in curves.values() for title in own):
        placed = {
            run.name: place_points(curves[run.name].get(title, {}), run.scalars.get(AXES[axis], {})) for run in runs
        }
        if any(map(len, placed.values())):
            points = ((name, *own.T) for name, own in placed.items())
            figures[title] = curves_as_svg(points, x=axis, y=title.partition(":")[0], log=_span(placed.values()) > 10)
    return figures


def _span(curves: Iterable[NDArray[np.float64]]) -> float:
    """Return the ratio of the largest to the smallest value of curves; 1 if they are not all above 0."""
    values = np.concatenate([points[:, 1] for points in curves])
    return float(values.max() / values.min()) if values.min() > 0 else 1.0


def _find_curves(run: ComparedRun) -> dict[str, Mapping[int, float]]:
    """Return the values of each quantity by optimizer step."""
    curves: dict[str, Mapping[int, float]] = {}
    for kind, name in (("longppl", "LongPPL"), ("perplexity", "Perplexity")):
        for cell, steps in sorted(run.evaluations.items(), key=lambda each: str(each[0])):
            perplexity = Cell(cell.set, numerics=cell.numerics)  # whoever finds key tokens
            title = f"{name}: {cell if kind == 'longppl' else perplexity}"
            curves[title] = {step: corpus_mean(documents, kind) for step, documents in steps.items()}
    rates = {f"Learning rate: {key[3:]}": values for key, values in run.scalars.items() if key.startswith("lr-")}
    return {**curves, "Training loss (nats)": run.scalars.get("train/loss", {}), **rates}


def place_points(curve: Mapping[int, float], axis: Mapping[int, float]) -> NDArray[np.float64]:
    """Return ``[N, 2]`` points of a curve by optimizer step over an axis, which is 0 before the first step."""
    points = np.array(sorted(curve.items()), dtype=np.float64).reshape(-1, 2)
    steps, values = zip((0, 0.0), *sorted(axis.items()), strict=True)
    points[:, 0] = np.interp(points[:, 0], steps, values)
    points = points[np.isfinite(points[:, 1])]
    return np.array([part.mean(axis=0) for part in np.array_split(points, _POINTS) if len(part)]).reshape(-1, 2)


def _rank_runs(runs: Sequence[ComparedRun], baseline: ComparedRun) -> Table:
    """Return the last evaluation of each run by cell, the best one first, those that have other documents last."""
    titles = [title for name in _TITLES.values() for title in (name, f"{name} / {baseline.name}'s")]
    head = ["set, evaluator, thresholds", "run", *titles, "step", "documents", "note"]
    cells = []
    for cell in sorted({cell for run in runs for cell in run.evaluations}, key=str):
        ranked = []
        evaluated = [run for run in runs if cell in run.evaluations]
        compared = compared_kinds([run.last(cell)[1] for run in evaluated])
        for run in evaluated:
            step, documents = run.last(cell)
            reference = baseline.last(cell)[1] if cell in baseline.evaluations else documents
            shared = shared_documents(documents, reference, compared[:2])
            count = max(len(documents), len(reference))
            is_partial = len(shared) < count
            note = f"ratio over {len(shared)} of {count} documents" if is_partial else ""
            number_of_documents = str(len(documents))
            if not has_documents(documents):
                number_of_documents = ""
                note = "no records by document, so no intervals"
            values = {kind: corpus_mean(documents, kind) for kind in (*TOKENS, "longppl_soft", *compared)}
            numbers = []
            for kind in _TITLES:
                ratio = _format_ratio(shared, kind) if kind in compared and reference is not documents else ""
                absent = kind == compared[0] and kind in TOKENS and not documents[UNITS[kind]].sum()
                numbers += ["no key tokens" if absent else _format_number(values.get(kind, math.nan)), ratio]
            order = [is_partial, *(math.inf if math.isnan(values[kind]) else values[kind] for kind in compared)]
            cells_of_run = [str(cell), run.name, *numbers, str(step or ""), number_of_documents, note]
            ranked.append((order, cells_of_run, run))
        ranked.sort(key=lambda each: each[:2])
        if len(ranked) > 1 and not ranked[1][0][0] and _is_better(ranked[0][2], ranked[1][2], cell, compared[0]):
            ranked[0][1][1] += " (best LongPPL)"
        cells += [row if number == 0 else ["", *row[1:]] for number, (_, row, _) in enumerate(ranked)]
    best: dict[str, Tone] = {f"{run.name} (best LongPPL)": "good" for run in runs}
    return _drop_empty_columns(head, cells)._replace(badges=best)


def _is_better(run: ComparedRun, other: ComparedRun, cell: Cell, kind: str) -> bool:
    """Return whether the interval of the ratio of two runs is below a tie, or only the other run is infinite."""
    shared = shared_documents(run.last(cell)[1], other.last(cell)[1], (kind,))
    value, interval = paired_ratio(shared, kind)
    return value == 0 if interval is None else interval[1] < 1


def _tabulate_costs(runs: Sequence[ComparedRun]) -> Table:
    rows = []
    for run in runs:
        last = (max(run.scalars.get(scalar, {}).values(), default=None) for scalar in AXES.values())
        numbers = ["" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in last]
        parameters = run.config.get("run.parameters", "")
        rows.append([run.name, *numbers, parameters and f"{int(parameters):,}"])
    return _drop_empty_columns(
        ["run", *AXES, "parameters"], rows if any(run.scalars.get("step") for run in runs) else []
    )


def _compare_settings(runs: Sequence[ComparedRun]) -> Table:
    runs = [run for run in runs if run.config]
    keys = sorted({key for run in runs for key in run.config})
    rows = [[key, *(run.config.get(key, "") for run in runs)] for key in keys]
    differing = [row for row in rows if len({*row[1:]}) > 1]
    absent = tuple(f"{row[0]}." for row in differing if "" in row)  # such as a callback that a run lacks
    return Table(["setting", *(run.name for run in runs)], [row for row in differing if not row[0].startswith(absent)])


def _find_changed_documents(runs: Sequence[ComparedRun], baseline: ComparedRun) -> dict[str, Table]:
    found = []
    for run in runs:
        for cell in run.evaluations.keys() & baseline.evaluations.keys():
            shared = shared_documents(run.last(cell)[1], baseline.last(cell)[1])
            if not has_documents(shared):
                continue
            numbers_of_both = shared[["document", "longppl", "longppl_baseline"]].dropna()
            for name, own, other in numbers_of_both.itertuples(index=False, name=None):
                numbers = map(_format_number, (other, own, own / other))
                change = abs(math.log(own) - math.log(other)) if own != other else 0.0  # both may be infinite
                found.append((-change, [str(cell), run.name, name, *numbers]))
    head = ["set, evaluator, thresholds", "run", "document", f"LongPPL of {baseline.name}", "LongPPL", "ratio"]
    return {"Documents that changed most": _drop_empty_columns(head, [row for _, row in sorted(found)[:_CHANGED]])}


def _drop_empty_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    kept = [number for number in range(len(head)) if any(row[number].strip() for row in rows)]
    return Table([head[number] for number in kept], [[row[number] for number in kept] for row in rows])


def _format_number(value: float) -> str:
    if not math.isfinite(value):
        return "" if math.isnan(value) else "∞"
    if value < 0.01 or value >= 1e9:
        return f"{value:.2g}"
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}"


def _format_ratio(shared: pd.DataFrame, kind: str) -> str:
    value, interval = paired_ratio(shared, kind)
    number = _format_number(value)
    if interval is not None:
        return f"{number} [{_format_number(interval[0])}, {_format_number(interval[1])}]"
    if not 0 < value < math.inf or not has_documents(shared):
        return number
    count = (shared[UNITS[kind]] > 0).sum()
    return f"{number} ({count} document{'s' if count > 1 else ''}: too few)"
