"""Compare the scores of several models on the same tasks: folders of ``longce evaluate``."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from lightning_modules.models.loading.provenance import Numerics, Provenance, describe_difference, describe_unknown
from lightning_modules.tasks.evaluation.answers import read_answers, split_evaluations
from lightning_modules.tasks.evaluation.evaluator import EvaluatorAccuracy
from lightning_modules.tasks.evaluation.report import describe_synthetic_text, short
from lightning_modules.tasks.evaluation.summary import Cells, summarize, tabulate
from lightning_modules.utilities.statistics import Interval, score_difference
from lightning_modules.visualization.images import PANEL, STYLE, as_svg
from lightning_modules.visualization.report import Table
from longce.correlate.result_files import FILES, OF_SETS, read_harness_cells

_QUESTIONS = ("mode", "seed", "documents", "haystack", "squad", "hotpot", "nq_open")  # settings that make questions

_NAMED = 4  # tasks in the verdict; RULER has 13
_MANY = 20  # cells, of which some differ by chance
_KEY = ["task", "length", "asked_depth", "index"]
_KIND = "mode"  # a setting of longce's own tasks, whose settings describe a folder that has both
_SHOTS = "n-shot"  # numbers of few-shot examples by task, in results of the harness
_PROMPTS = ("chat_template", "system_instruction", "gen_kwargs")  # settings of the same questions


class ComparedEvaluation(NamedTuple):
    """Scores of a model, the answered questions of longce's tasks, and the number of those without an answer.

    ``as_evaluator`` has its accuracy as an evaluator, by task and length, in the mode ``key_tokens``.
    """

    name: str
    cells: Cells
    questions: pd.DataFrame
    settings: dict[str, Any]
    missing: int
    as_evaluator: dict[tuple[str, int], EvaluatorAccuracy]


def read_evaluation(name: str, path: Path) -> ComparedEvaluation:
    """Read a folder of ``longce evaluate``, or a file of answers; a ``ValueError`` if it is damaged."""
    found = ComparedEvaluation(name, {}, tabulate([]).astype({"length": str}), {}, 0, {})
    files = [path] if path.is_file() else list_files(path)
    for file in files:
        add = _add_answers if file.suffix == ".parquet" else _add_harness
        found = add(found, file)
    return found


def _add_answers(evaluation: ComparedEvaluation, file: Path) -> ComparedEvaluation:
    evaluations = split_evaluations(read_answers(file))
    if len(evaluations) != 1:
        raise ValueError(f"'{file}' has the answers of {len(evaluations)} evaluations: write a file for each.")
    (answers,) = evaluations
    summary = summarize(answers)
    several = len({task for task, _ in summary.scores}) > 1
    cells = {place: cell for place, cell in summary.cells().items() if place[0] != "average" or several}
    questions = tabulate(answers).astype({"length": str})
    return evaluation._replace(
        cells=cells,
        questions=questions,
        settings=answers[0].settings,
        missing=summary.missing,
        as_evaluator=summary.as_evaluator,
    )


def _add_harness(evaluation: ComparedEvaluation, file: Path) -> ComparedEvaluation:
    try:
        content = json.loads(file.read_bytes())
        cells = read_harness_cells(content)
        settings = _describe_harness(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{file}' is not a result of `longce evaluate`, or is damaged ({error!r}).") from error
    earlier = evaluation.settings
    if _SHOTS in earlier:  # another file of the harness
        shots = earlier[_SHOTS] | settings[_SHOTS]
        differs = [name for name in ("model", "limit", "truncation") if earlier.get(name) != settings.get(name)]
        differs += [f"few-shot examples of {task}" for task in earlier[_SHOTS] if earlier[_SHOTS][task] != shots[task]]
        if differs:
            raise ValueError(
                f"'{file.parent}' has results of the harness that differ in {', '.join(differs)}: put them in separate"
                " folders."
            )
        settings[_SHOTS] = shots
    return evaluation._replace(cells=evaluation.cells | cells, settings=earlier if _KIND in earlier else settings)


def list_files(folder: Path) -> list[Path]:
    """Return the files of ``longce evaluate`` in a folder."""
    return [file for pattern in FILES for file in sorted(folder.glob(pattern))]


def _describe_harness(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content["config"], "model": content["model_name"], _SHOTS: content.get("n-shot", {})}


def tabulate_evaluations(evaluations: Sequence[ComparedEvaluation]) -> tuple[Table, list[str]]:
    """Return a table of scores with 95% intervals, and notes on how to read it.

    With longce's tasks it has the differences from the first model over the same questions, if these are the same.
    """
    baseline = evaluations[0]
    paired = _find_paired(evaluations)
    notes = [
        f"{other.name} and {baseline.name} answered different questions ({differing}): no differences."
        for other in evaluations[1:]
        if not other.questions.empty and (differing := _differing_settings(baseline, other))
    ]
    for other in evaluations[1:]:
        changed = [name for name in _PROMPTS if other.settings.get(name) != baseline.settings.get(name)]
        if changed and not other.questions.empty and not baseline.questions.empty:
            notes.append(f"{other.name} and {baseline.name} got different prompts: {', '.join(changed)} differ.")
    notes += _describe_numerics(evaluations)
    head = ["task", "length or metric", *(each.name for each in evaluations)]
    head += [f"{other.name} - {baseline.name}" for other in paired]
    notes += [f"{each.missing} questions of {each.name} have no result yet." for each in evaluations if each.missing]
    synthetic = {
        note for each in evaluations for note in describe_synthetic_text(set(each.questions["task"]), each.settings)
    }
    described = [(each.name, each.settings.get("model"), Provenance.read(each.settings)) for each in evaluations]
    notes += [
        f"{name}: {model or 'a model in training'} ({found or 'not identified by content'})."
        for name, model, found in described
    ]
    notes = [_describe_scores(evaluations, paired=bool(paired)), *notes, *sorted(synthetic)]
    rows = []
    for place in dict.fromkeys(place for each in evaluations for place in each.cells):
        digits = 1 if place[1] == OF_SETS or place[1].isdigit() else 3
        scores = [_format_score(*each.cells.get(place, (math.nan, None)), digits) for each in evaluations]
        differences = [_subtract_scores(other, baseline, place) for other in paired]
        rows.append(
            [*place, *scores, *("" if each is None else _format_score(*each, sign="+") for each in differences)]
        )
    return Table(head, rows), notes


def _describe_scores(evaluations: Sequence[ComparedEvaluation], *, paired: bool) -> str:
    """Explain the scores, with the number of questions for each task and length if it is the same for all."""
    asked = [each.questions.groupby(["task", "length"]).size() for each in evaluations if not each.questions.empty]
    counts = {int(count) for sizes in asked for count in sizes}
    metrics = any(not (length.isdigit() or length == OF_SETS) for each in evaluations for _, length in each.cells)
    return (
        f"Scores in percent{' (metrics of lm-evaluation-harness as they are)' if metrics else ''}"
        f"{f' of {counts.pop()} questions for each task and length' if len(counts) == 1 else ''}, with 95% intervals."
        f"{' Differences are over the same questions.' if paired else ''}"
    )


def judge_evaluations(evaluations: Sequence[ComparedEvaluation]) -> list[str]:
    """Return a sentence on each model: on how many cells (task and length) it is better or worse than the first one."""
    sentences = []
    compared = 0
    for other in _find_paired(evaluations):
        outcomes: dict[str, dict[str, list[str]]] = {"better": {}, "worse": {}, "tie": {}}
        for task, length in other.cells:
            if (difference := _subtract_scores(other, evaluations[0], (task, length))) is not None:
                low, high = difference[1] or (-math.inf, math.inf)
                outcome = "better" if low > 0 else "worse" if high < 0 else "tie"
                outcomes[outcome].setdefault(task, []).append(length)
        sizes = {outcome: sum(map(len, tasks.values())) for outcome, tasks in outcomes.items()}
        total = sum(sizes.values())
        compared = max(compared, total)
        found = [
            f"{outcome} in {sizes[outcome]} of {total} cells: {_list_cells(outcomes[outcome])}"
            for outcome in ("better", "worse")
            if sizes[outcome]
        ]
        pair = f"Compared with `{evaluations[0].name}`, `{other.name}`"
        if found:
            rest = f"; no difference is shown in {sizes['tie']}" if sizes["tie"] else ""
            sentences.append(f"{pair} is {', and '.join(found)}{rest}.")
        elif total:
            sentences.append(f"{pair} shows no difference in any of {total} cells.")
    if compared >= _MANY:
        by_chance = compared / 40  # each end of a 95% interval
        sentences.append(
            f"By chance alone, about {by_chance:.0f} of {compared} cells would be better, and the same number worse."
        )
    return sentences


def _list_cells(tasks: Mapping[str, Sequence[str]]) -> str:
    """List the first tasks with their lengths, such as ``needle (1024, 2048), vt (4096)``."""
    listed = [f"{task} ({', '.join(lengths)})" for task, lengths in tasks.items()]
    more = f" and {len(listed) - _NAMED} more tasks" if len(listed) > _NAMED else ""
    return f"{', '.join(listed[:_NAMED])}{more}"


def _find_paired(evaluations: Sequence[ComparedEvaluation]) -> list[ComparedEvaluation]:
    """Return the evaluations that answered the questions of the first one, with the same dtype and attention."""
    baseline, *others = evaluations
    if baseline.questions.empty:
        return []
    numerics = Numerics.read(baseline.settings)
    return [
        each
        for each in others
        if not each.questions.empty
        and not _differing_settings(baseline, each)
        and Numerics.read(each.settings) == numerics
    ]


def _describe_numerics(evaluations: Sequence[ComparedEvaluation]) -> list[str]:
    """Return sentences on numerics that are unknown or differ."""
    groups: dict[Numerics, list[str]] = {}
    for each in evaluations:
        groups.setdefault(Numerics.read(each.settings), []).append(each.name)
    unknown = [name for numerics, names in groups.items() if not numerics.is_known for name in names]
    return describe_unknown(unknown) + ([describe_difference(groups)] if len(groups) > 1 else [])


def draw_scores(evaluations: Sequence[ComparedEvaluation]) -> dict[str, str]:
    """Draw the scores of each task at several lengths, and their average, as SVG text by name: a line per model."""
    lengths: dict[str, set[int]] = {"average": set()}  # first, because models are compared by it
    for each in evaluations:
        for task, length in each.cells:
            if length.isdigit():
                lengths.setdefault(task, set()).add(int(length))
    return {task: _draw_task(evaluations, task, sorted(own)) for task, own in lengths.items() if len(own) > 1}


@matplotlib.rc_context(STYLE)
def _draw_task(evaluations: Sequence[ComparedEvaluation], task: str, lengths: Sequence[int]) -> str:
    figure = Figure(figsize=PANEL, layout="constrained")
    plot = figure.subplots()
    for number, (each, line) in enumerate(zip(evaluations, cycle(("-", "--", "-.", ":")), strict=False)):
        cells = {length: each.cells[task, str(length)] for length in lengths if (task, str(length)) in each.cells}
        # Lines are a little apart, so that intervals do not hide each other.
        places = [length * 1.02**number for length in cells]
        (drawn,) = plot.plot(places, [mean for mean, _ in cells.values()], f"o{line}", markersize=3, label=each.name)
        ends = [(place, *interval) for place, (_, interval) in zip(places, cells.values(), strict=True) if interval]
        for place, low, high in ends:
            plot.vlines(place, low, high, color=drawn.get_color(), linewidth=0.9)
    plot.set_xscale("log", base=2)
    plot.set_xticks(lengths, [short(length) for length in lengths])
    plot.set_xticks([], minor=True)
    plot.set(xlabel="length (tokens)", ylabel="score (%)", ylim=(-3, 103))
    figure.legend(loc="outside upper left", ncols=2)
    return as_svg(figure)


def _differing_settings(one: ComparedEvaluation, other: ComparedEvaluation) -> str:
    pairs = [(name, one.settings.get(name), other.settings.get(name)) for name in _QUESTIONS]
    return ", ".join(f"{name} = {first!r} and {second!r}" for name, first, second in pairs if first != second)


def _subtract_scores(
    one: ComparedEvaluation, other: ComparedEvaluation, place: tuple[str, str]
) -> tuple[float, Interval | None] | None:
    """Return the difference of the scores in percent, over the questions that both have answered, if there are any."""
    tables = [each.questions[(each.questions[["task", "length"]] == [*place]).all(axis=1)] for each in (one, other)]
    both = tables[0].merge(tables[1], on=_KEY)
    if both.empty:
        return None
    value, interval = score_difference(both["score_x"], both["score_y"], both["index"].tolist())
    return 100 * value, interval and (100 * interval[0], 100 * interval[1])


def _format_score(value: float, interval: Interval | None, digits: int = 1, *, sign: str = "") -> str:
    if math.isnan(value):
        return ""
    ends = "" if interval is None else " [{}, {}]".format(*(f"{end:{sign}.{digits - 1}f}" for end in interval))
    return f"{value:{sign}.{digits}f}{ends}"
