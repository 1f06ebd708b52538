"""Measure Table 9: LongEval by prompt length, generated and with teacher forcing, by ``longce evaluate``."""

import logging
import math
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.reproduction.tables.options import MeasureOptions
from benchmarks.reproduction.tables.published import Cells, Intervals, NamedModel, Table
from benchmarks.reproduction.tables.results import file_name, reason
from lightning_modules.models.loading.config import is_served
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, Answer, read_answers
from lightning_modules.tasks.evaluation.config import Mode
from lightning_modules.tasks.evaluation.summary import summarize, tabulate
from lightning_modules.utilities.statistics import Interval, weighted_mean_interval
from longce.evaluate import evaluate

TASK = "longeval_lines"
_FOLDERS: dict[Mode, str] = {"teacher_forced": "longeval", "generate": "longeval_generated"}
"""Folders of the evaluations in each mode, with a folder for each model."""
_PERPLEXITIES = {"PPL (answer tokens)": "answer", "PPL (non-answer tokens)": "other"}

log = logging.getLogger(__name__)


def measure_longeval(table: Table, models: Sequence[NamedModel], folder: Path, options: MeasureOptions) -> list[str]:
    """Evaluate models at the lengths of the table up to `max_tokens`, with `documents` questions each.

    Teacher forcing gives the perplexities, and generation the accuracy; a served model does not generate. Each model
    has a folder for each mode, where answered questions are not asked again. Returns one line per failure; the next
    model is evaluated nevertheless.
    """
    lengths = [length for column in table.columns if (length := _tokens(column)) <= options.max_tokens]
    if not lengths:
        raise ValueError(
            f"`max_tokens` = {options.max_tokens} is below the shortest length, {_tokens(table.columns[0])}."
        )
    failures = []
    names = ("dtype", "attn_implementation", "device", "trust_remote_code")
    loading = {name: getattr(options, name) for name in names}
    questions = {"tasks": [TASK], "lengths": lengths, "samples": options.documents}
    for model in models:
        modes: list[Mode] = ["teacher_forced"] if is_served(model.path) else ["teacher_forced", "generate"]
        try:
            for mode in modes:
                evaluate(model.path, str(_folder(folder, model.name, mode)), mode=mode, **questions, **loading)
        except Exception as error:  # a model's own code may raise anything, and others must continue
            failures.append(f"{model.name}: {reason(error)}")
            log.error("%s", failures[-1])
    return failures


def other_models(models: Iterable[NamedModel], folders: Sequence[Path]) -> list[NamedModel]:
    """Return the models with results in the folders that are not among ``models``, each once."""
    paths = {path.name: str(path) for folder in folders for path in sorted(folder.glob("longeval/*"))}
    known = {file_name(model.name) for model in models}
    return [NamedModel(name, path) for name, path in paths.items() if name not in known]


def longeval_cells(table: Table, models: Iterable[NamedModel], folders: Sequence[Path]) -> tuple[Cells, Intervals]:
    """Return accuracies in % and perplexities of models by length, and their 95% intervals over questions.

    As in the paper, the accuracy is that of generated answers. Teacher-forced answers have a separate row.
    """
    cells: Cells = {}
    intervals: dict[tuple[str, str], Interval | None] = {}
    columns = {_tokens(column): column for column in table.columns}
    for model in models:
        generated = _read_answers(folders, model.name, "generate", columns)
        forced = _read_answers(folders, model.name, "teacher_forced", columns)
        for answers, row in ((generated, "LongEval accuracy"), (forced, "LongEval accuracy (teacher-forced)")):
            scores = summarize(answers).scores if answers else {}
            for (_, length), score in scores.items():
                place = f"{model.name}: {row}", columns[length]
                cells[place] = score.mean
                intervals[place] = score.interval
        for length, questions in tabulate(forced).groupby("length"):
            for name, kind in _PERPLEXITIES.items():
                place = f"{model.name}: {name}", columns[length]
                cells[place], intervals[place] = _perplexity(questions[f"{kind}_nll"], questions[f"{kind}_tokens"])
    return cells, intervals


def _read_answers(folders: Sequence[Path], model: str, mode: Mode, lengths: Container[int]) -> list[Answer]:
    """Return the answers of a model at these lengths from the first folder that has them, else none."""
    for folder in folders:
        file = _folder(folder, model, mode) / ANSWERS_FILE
        if file.is_file():
            return [each for each in read_answers(file) if each.task == TASK and each.length in lengths]
    return []


def _perplexity(nll: pd.Series, tokens: pd.Series) -> tuple[float, Interval | None]:
    """Return the perplexity over all tokens of questions, and its interval."""
    means, weights = nll.to_numpy(np.float64) / tokens.to_numpy(), tokens.to_numpy(np.float64)
    interval = weighted_mean_interval(means, weights)
    return math.exp(np.average(means, weights=weights)), interval and (math.exp(interval[0]), math.exp(interval[1]))


def _tokens(column: str) -> int:
    return 1024 * int(column.removesuffix("k"))


def _folder(folder: Path, model: str, mode: Mode) -> Path:
    return folder / _FOLDERS[mode] / file_name(model)
