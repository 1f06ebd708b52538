"""Measure Table 9: LongEval by prompt length with teacher forcing, by ``longce evaluate``."""

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.reproduction.tables.options import MeasureOptions
from benchmarks.reproduction.tables.published import Cells, Intervals, NamedModel, Table
from benchmarks.reproduction.tables.results import file_name, reason
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, read_answers
from lightning_modules.tasks.evaluation.summary import summarize, tabulate
from lightning_modules.utilities.statistics import Interval, weighted_mean_interval
from longce.evaluate import evaluate

TASK = "longeval_lines"
_PERPLEXITIES = {"PPL (answer tokens)": "answer", "PPL (non-answer tokens)": "other"}

log = logging.getLogger(__name__)


def measure_longeval(table: Table, models: Sequence[NamedModel], folder: Path, options: MeasureOptions) -> list[str]:
    """Evaluate models at the lengths of the table up to `max_tokens`, with as many questions as `documents`.

    Each model has a folder in ``folder/longeval``, where answered questions are not asked again. Returns one line per
    failure; the next model is evaluated nevertheless.
    """
    lengths = [length for column in table.columns if (length := _tokens(column)) <= options.max_tokens]
    if not lengths:
        raise ValueError(
            f"`max_tokens` = {options.max_tokens} is below the shortest length, {_tokens(table.columns[0])}."
        )
    failures = []
    names = ("dtype", "attn_implementation", "device", "trust_remote_code")
    loading = {name: getattr(options, name) for name in names}
    for model in models:
        questions = {"tasks": [TASK], "lengths": lengths, "samples": options.documents, "mode": "teacher_forced"}
        try:
            evaluate(model.path, str(_folder(folder, model.name)), **questions, **loading)
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
    """Return accuracies in % and perplexities of models by length, and their 95% intervals over questions."""
    cells: Cells = {}
    intervals: dict[tuple[str, str], Interval | None] = {}
    columns = {_tokens(column): column for column in table.columns}
    for model in models:
        path = next((path for folder in folders if (path := _folder(folder, model.name)).is_dir()), None)
        if path is None or not (path / ANSWERS_FILE).is_file():
            continue
        answers = [answer for answer in read_answers(path / ANSWERS_FILE) if answer.task == TASK]
        questions = tabulate(answers)
        for (_, length), score in summarize(answers).scores.items():
            column = columns.get(length)
            if column is None:
                continue
            place = f"{model.name}: LongEval accuracy", column
            cells[place] = score.mean
            intervals[place] = score.interval
            of_length = questions[questions["length"] == length]
            for name, kind in _PERPLEXITIES.items():
                place = f"{model.name}: {name}", column
                cells[place], intervals[place] = _perplexity(of_length[f"{kind}_nll"], of_length[f"{kind}_tokens"])
    return cells, intervals


def _perplexity(nll: pd.Series, tokens: pd.Series) -> tuple[float, Interval | None]:
    """Return the perplexity over all tokens of questions, and its interval."""
    means, weights = nll.to_numpy(np.float64) / tokens.to_numpy(), tokens.to_numpy(np.float64)
    interval = weighted_mean_interval(means, weights)
    return math.exp(np.average(means, weights=weights)), interval and (math.exp(interval[0]), math.exp(interval[1]))


def _tokens(column: str) -> int:
    return 1024 * int(column.removesuffix("k"))


def _folder(folder: Path, model: str) -> Path:
    return folder / "longeval" / file_name(model)
