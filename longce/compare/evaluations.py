"""Compare the scores of several models on the same tasks: folders of ``longce evaluate``."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lightning_modules.models.loading.provenance import Numerics, Provenance, describe_numerics
from lightning_modules.tasks.evaluation.answers import Answer, read_answers, split_evaluations
from lightning_modules.tasks.evaluation.evaluator import EvaluatorAccuracy
from lightning_modules.tasks.evaluation.report import describe_synthetic_text, short
from lightning_modules.tasks.evaluation.summary import Cells, summarize, tabulate
from lightning_modules.utilities.statistics import in_percent, score_difference
from lightning_modules.visualization.images import curves_as_svg
from lightning_modules.visualization.report import Table, format_estimate
from longce.correlate.result_files import OF_SETS, list_files, read_harness_cells

_QUESTIONS = ("mode", "seed", "documents", "haystack", "squad", "hotpot", "nq_open")  # settings that make questions
_PROMPTS = ("chat_template", "system_instruction", "gen_kwargs")  # settings of the same questions
_KEY = ["task", "task_code", "length", "asked_depth", "index"]
_MANY = 20  # cells, of which some differ by chance
_ABSENT = (math.nan, None)  # score and interval


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
    files = [path] if path.is_file() else list_files(path)
    found = ComparedEvaluation(name, {}, _tabulate([]), {}, 0, {})
    results = []
    for file in files:
        if file.suffix == ".parquet":
            found = _read_answers(name, file)
        elif file.suffix == ".json":
            results.append(file)
    cells, settings = _read_harness(results)
    # Settings of longce's own tasks describe a folder that has both.
    return found._replace(cells=found.cells | cells, settings=found.settings or settings)


def _read_answers(name: str, file: Path) -> ComparedEvaluation:
    evaluations = split_evaluations(read_answers(file))
    if len(evaluations) != 1:
        raise ValueError(f"'{file}' has the answers of {len(evaluations)} evaluations: write a file for each.")
    (answers,) = evaluations
    summary = summarize(answers)
    cells = summary.cells()
    tasks = {task for task, _ in summary.scores}
    if len(tasks) < 2:
        for length in summary.averages:
            del cells["average", str(length)]
    settings = answers[0].settings
    return ComparedEvaluation(name, cells, _tabulate(answers), settings, summary.missing, summary.as_evaluator)


def _tabulate(answers: Sequence[Answer]) -> pd.DataFrame:
    return tabulate(answers).astype({"length": str})


def _read_harness(files: Sequence[Path]) -> tuple[Cells, dict[str, Any]]:
    """Return the metrics in results of lm-evaluation-harness for one model, and the settings of the last one."""
    cells: Cells = {}
    settings: dict[str, Any] = {}
    for file in files:
        try:
            content = json.loads(file.read_bytes())
            found = read_harness_cells(content)
            about = {**content["config"], "model": content["model_name"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"'{file}' is not a result of `longce evaluate`, or is damaged ({error!r}).") from error
        repeated = [task for (task, key), cell in found.items() if cells.get((task, key), cell) != cell]
        if settings and settings["model"] != about["model"]:
            repeated = ["two models"]
        if repeated:
            raise ValueError(f"'{file.parent}' has different results of {repeated[0]}: put them in separate folders.")
        cells |= found
        settings = about
    return cells, settings


def subtract_scores(evaluation: ComparedEvaluation, baseline: ComparedEvaluation) -> Cells:
    """Return the differences of two models' scores in percent over the questions that both answered, with intervals.

    Empty if the models got different questions, or have different dtype, precision or attention. Tasks of the user's
    own class are left out if its code differs.
    """
    if _differing_settings(evaluation, baseline, _QUESTIONS):
        return {}
    if Numerics.read(evaluation.settings) != Numerics.read(baseline.settings):
        return {}
    both = evaluation.questions.merge(baseline.questions, on=_KEY, suffixes=("", "_baseline"))
    differences: Cells = {}
    for (task, length), rows in both.groupby(["task", "length"], sort=False):
        value, interval = score_difference(rows["score"], rows["score_baseline"], rows["index"].tolist())
        differences[task, length] = (100 * value, in_percent(interval))
    return differences


def _differing_settings(one: ComparedEvaluation, other: ComparedEvaluation, names: Sequence[str]) -> list[str]:
    return [name for name in names if one.settings.get(name) != other.settings.get(name)]


def judge_differences(name: str, baseline: str, differences: Cells) -> str:
    """Return a sentence on how many cells (task and length) of a model are better or worse than the baseline's."""
    better = []
    worse = []
    for (task, _), (_, interval) in differences.items():
        if interval is not None and interval[0] > 0:
            better.append(task)
        elif interval is not None and interval[1] < 0:
            worse.append(task)
    cells = len(differences)
    found = []
    for outcome, tasks in (("better", better), ("worse", worse)):
        if tasks:
            found.append(f"{outcome} in {len(tasks)} of {cells} cells ({', '.join(dict.fromkeys(tasks))})")
    judged = f"shows no difference in any of {cells} cells"
    if found:
        judged = f"is {' and '.join(found)}"
    sentence = f"Compared with `{baseline}`, `{name}` {judged}."
    if cells >= _MANY:
        by_chance = cells / 40  # each end of a 95% interval
        sentence += f" By chance alone, about {by_chance:.0f} would be better, and the same number worse."
    return sentence


def tabulate_scores(evaluations: Sequence[ComparedEvaluation], differences: Mapping[str, Cells]) -> Table:
    """Return a table of scores, and of ``differences`` from the first model by the names of others."""
    columns = {each.name: each.cells for each in evaluations}
    head = ["task", "length or metric", *columns]
    head += [f"{name} - {evaluations[0].name}" for name in differences]
    rows = []
    for place in dict.fromkeys(chain.from_iterable(columns.values())):
        _, length = place
        spec = ".1f" if length == OF_SETS or length.isdigit() else ".3f"
        scores = [format_estimate(*cells.get(place, _ABSENT), spec, ".0f") for cells in columns.values()]
        changes = [format_estimate(*cells.get(place, _ABSENT), "+.1f", "+.0f") for cells in differences.values()]
        rows.append([*place, *scores, *changes])
    return Table(head, rows)


def describe_evaluations(evaluations: Sequence[ComparedEvaluation]) -> list[str]:
    """Return notes on how to read the scores, and on what differs between the models besides their weights."""
    baseline, *others = evaluations
    notes = _explain_scores(evaluations)
    for other in others:
        if other.questions.empty or baseline.questions.empty:
            continue
        for given, names in (("questions", _QUESTIONS), ("prompts", _PROMPTS)):
            differing = _differing_settings(baseline, other, names)
            if differing:
                notes.append(f"{other.name} and {baseline.name} got different {given} ({', '.join(differing)}).")
        both = _list_task_codes(other).merge(_list_task_codes(baseline), on="task", suffixes=("", "_baseline"))
        changed = both["task"][both["task_code"] != both["task_code_baseline"]]
        if len(changed):
            notes.append(f"{other.name} and {baseline.name} ran different code of {', '.join(changed)}.")
    notes += describe_numerics((each.name, Numerics.read(each.settings)) for each in evaluations)
    synthetic: set[str] = set()
    for each in evaluations:
        if each.missing:
            notes.append(f"{each.missing} questions of {each.name} have no result yet.")
        model = each.settings.get("model") or "a model in training"
        notes.append(f"{each.name}: {model} ({Provenance.read(each.settings) or 'not identified by content'}).")
        synthetic.update(describe_synthetic_text(set(each.questions["task"]), each.settings))
    return [*notes, *sorted(synthetic)]


def _list_task_codes(evaluation: ComparedEvaluation) -> pd.DataFrame:
    return evaluation.questions[["task", "task_code"]].drop_duplicates()


def _explain_scores(evaluations: Sequence[ComparedEvaluation]) -> list[str]:
    baseline, *others = evaluations
    has_scores = False  # of longce's tasks
    has_metrics = False
    for _, length in chain.from_iterable(each.cells for each in evaluations):
        if length.isdigit():
            has_scores = True
        else:
            has_metrics = True
    notes = []
    if has_scores:
        notes.append("Scores are in percent with 95% intervals.")
    if has_metrics:
        notes.append("Metrics of lm-evaluation-harness are as it computes them.")
    if any(subtract_scores(other, baseline) for other in others):
        notes.append("Differences are over the same questions.")
    return notes


def draw_scores(evaluations: Sequence[ComparedEvaluation]) -> dict[str, str]:
    """Draw the scores of each task at several lengths, and their average, as SVG text by name: a line per model."""
    lengths: dict[str, set[int]] = {"average": set()}  # first, because models are compared by it
    for each in evaluations:
        for task, length in each.cells:
            if length.isdigit():
                lengths.setdefault(task, set()).add(int(length))
    figures = {}
    for task, found in lengths.items():
        measured = sorted(found)
        labels = list(map(short, measured))
        lines = []
        for each in evaluations:
            means = [each.cells.get((task, str(length)), _ABSENT)[0] for length in measured]
            lines.append((each.name, labels, means))
        if len(measured) > 1:
            figures[task] = curves_as_svg(lines, x="length (tokens)", y="score (%)")
    return figures
