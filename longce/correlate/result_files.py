"""Read the results of models that this project's commands and other tools measured."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_modules.models.loading.provenance import NOT_RECORDED, UNKNOWN, Numerics, Provenance, describe_key_tokens
from lightning_modules.scoring.records import (
    Record,
    measurement_settings,
    read_records,
    split_measurements,
    summarize,
)
from lightning_modules.tasks.evaluation.answers import (
    ANSWERS_FILE,
    FORMAT,
    Answer,
    read_answers,
    split_evaluations,
)
from lightning_modules.tasks.evaluation.report import short
from lightning_modules.tasks.evaluation.summary import Cells
from lightning_modules.tasks.evaluation.summary import summarize as summarize_answers
from lightning_modules.tasks.harness.results import SETS, list_metrics, summarize_results
from lightning_modules.tasks.questions.registry import GROUPS
from lightning_modules.utilities.statistics import UNITS, Interval, mean_interval
from lightning_modules.utilities.tables import read_format

OF_SETS = "score, %"
"""Name of the score of a set of the harness's tasks among the metrics."""

_PROMPTS = ("num_fewshot", "limit", "truncation")  # settings on which values of the harness's tasks depend
_SUFFIXES = (".csv", ".json", ".parquet")


class Value(NamedTuple):
    """A number that was measured of a model."""

    number: float  # NaN if the measurement is not a number
    settings: Mapping[str, Any] = MappingProxyType({})  # which must be equal to compare it; empty if unknown
    interval: Interval | None = None  # 95%, of a score of ``longce evaluate``
    is_main: bool = True  # whether it summarizes others, such as an average over tasks


class Measured(NamedTuple):
    """Values of a model from one file."""

    place: str  # file, with the line if it has several
    model: str  # name, hub id or folder; empty if the file does not name it
    values: dict[str, Value]
    provenance: Provenance | None = None  # of the model, if the file has it
    key_tokens: str = ""  # how the key tokens of LongPPL were found
    numerics: Numerics = UNKNOWN  # dtype, precision and attention of the model


def read_results(words: Sequence[str]) -> list[Measured]:
    """Read result files, with one entry per file and model.

    Each word is a file, a folder of ``longce evaluate``, of such folders or of other files, or ``NAME=FILE`` for
    results of a single model, which gets this name. The files are records of ``longce score --output``,
    ``answers.parquet`` of ``longce evaluate``, ``results_*.json`` of lm-evaluation-harness, or CSV with a line for each
    model: its name in the column ``model``, and values in the others, where a cell may be blank.
    """
    entries = []
    for word in words:
        entries += _read_word(word)
    return entries


def is_perplexity(name: str) -> bool:
    """Return whether a value is a perplexity, by its name."""
    # The letters "ppl" end a word: "applied" is a score.
    return re.search(r"ppl(?![a-z])|perplexity|bits_per_byte", name.lower()) is not None


def known_name(name: str) -> str:
    """Return the name of a metric of records, which a table may write as ``LongPPL``; another name as it is."""
    return name.lower() if name.lower() in UNITS else name


def split_name(word: str) -> tuple[str, Path]:
    """Return the name and the path of ``NAME=PATH``; the name of a path alone is empty."""
    name, equals, path = word.partition("=")
    if equals and not Path(word).expanduser().exists():
        return name, Path(path).expanduser()
    return "", Path(word).expanduser()


def list_files(folder: Path) -> list[Path]:
    """Return the files of ``longce evaluate`` in a folder: answers, and results of lm-evaluation-harness."""
    return [*folder.glob(ANSWERS_FILE), *sorted(folder.glob("results_*.json"))]


def _read_word(word: str) -> list[Measured]:
    name, path = split_name(word)
    entries = []
    for file in _find_files(path):
        entries += _read_file(file)
    if not entries:
        raise ValueError(
            f"No results at '{word}': pass .parquet, .json or .csv files, folders that contain them, or NAME=FILE."
        )
    models = {entry.model for entry in entries}
    if name and len(models) > 1:
        raise ValueError(f"'{path}' has {len(models)} models: rename them in the file instead of by '{name}='.")
    if name:
        return [entry._replace(model=name) for entry in entries]
    for entry in entries:
        if not entry.model:
            raise ValueError(f"{entry.place} does not name its model: use NAME={word}.")
    return entries


def _find_files(path: Path) -> list[Path]:
    """Return a file, the files of an evaluation in a folder, else all its files, else the evaluations in it."""
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    files = list_files(path) or sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES)
    if files:
        return files
    for folder in sorted(path.glob("*/")):
        files += list_files(folder)
    return files


def _read_file(file: Path) -> list[Measured]:
    if file.suffix == ".parquet":
        if read_format(file) == FORMAT:
            return [_summarize_answers(file, answers) for answers in split_evaluations(read_answers(file))]
        return [_summarize_records(file, records) for records in split_measurements(read_records(file))]
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".csv":
            return _parse_table(file, text)
        return [_parse_harness(file, json.loads(text))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else "a key is missing or has the wrong type"
        raise ValueError(
            f"'{file}' is not a table of models (.csv) or a result of lm-evaluation-harness (.json): {reason}."
        ) from error


def _summarize_records(file: Path, records: Sequence[Record]) -> Measured:
    """Return the numbers of a measurement of ``longce score``: of a model, by a definition of key tokens."""
    total = summarize(records)
    first = records[0]
    model = first.model
    measured = measurement_settings(records)
    # Set, stage and step of a run; empty for a stored model.
    of_text: dict[str, Any] = {}
    for name in ("set", "stage", "step"):
        value = getattr(first, name)
        if value:
            of_text[name] = value
    for name in ("texts", "add_special_tokens"):
        of_text[name] = measured[name]
    of_text |= model.numerics._asdict()
    key_tokens = describe_key_tokens(measured, first.evaluator.provenance)
    settings = of_text | measured
    without_thresholds = dict(settings)
    for name in ("alpha", "beta", "key_token_rule"):
        del without_thresholds[name]
    depends_on = {"perplexity": of_text, "bits_per_byte": of_text, "longppl_soft": without_thresholds}
    values = {name: Value(getattr(total, name), depends_on.get(name, settings)) for name in UNITS}
    if not total.soft_weight:  # unknown, such as by `--key_tokens_only`
        del values["longppl_soft"]
    return Measured(str(file), model.name, values, model.provenance, key_tokens, model.numerics)


def _summarize_answers(file: Path, answers: Sequence[Answer]) -> Measured:
    """Return the scores of each task by length, and means over the lengths of tasks, of RULER and of LongEval."""
    summary = summarize_answers(answers)
    if summary.missing:
        raise ValueError(
            f"{summary.missing} questions in '{file}' have no answer: run the same `longce evaluate` again to complete"
            " them."
        )
    first = answers[0]
    numerics = first.model.numerics
    about = {"by": "evaluate", **first.setting._asdict(), **numerics._asdict()}
    scores = _group_by_task(summary.cells(), about)
    values: dict[str, Value] = {}
    for task, by_length in scores.items():
        # Means over different lengths are not comparable.
        values[task] = _average(by_length.values(), about | {"lengths": sorted(by_length)})
        for length, score in by_length.items():
            label = short(length) if task == "LongEval" else str(length)
            values[f"{task} {label}"] = score
    over_all = about | {"lengths": sorted(set().union(*scores.values()))}
    if scores.keys() >= set(GROUPS["ruler"]):
        values["RULER"] = _average([values[task] for task in GROUPS["ruler"]], over_all)
    answer_perplexity, other_perplexity = summary.perplexities.get((None, None), (math.nan, math.nan))
    others = {
        "weighted_inc": summary.weighted_inc,
        "weighted_dec": summary.weighted_dec,
        "answer_perplexity": answer_perplexity,
        "other_perplexity": other_perplexity,
    }
    for name, number in others.items():
        if math.isfinite(number):
            values[name] = Value(number, over_all, is_main=False)
    main = {"RULER", "LongEval"} & values.keys() or {"average"}
    for name in main:
        values[name] = values[name]._replace(is_main=True)
    provenance = first.model.provenance if first.model.identity else None  # unknown for a model in training
    return Measured(str(file), first.model.name, values, provenance, numerics=numerics)


def _group_by_task(cells: Cells, settings: Mapping[str, Any]) -> dict[str, dict[int, Value]]:
    """Return the scores by task and length, of the average over tasks and of LongEval as well."""
    found: dict[str, dict[int, Value]] = {"average": {}}
    for (task, length), (mean, interval) in cells.items():
        score = Value(mean, settings, interval, is_main=False)
        found.setdefault(task, {})[int(length)] = score
        if task in GROUPS["longeval"]:
            found.setdefault("LongEval", {})[int(length)] = score
    return found


def _average(scores: Iterable[Value], settings: Mapping[str, Any]) -> Value:
    numbers = []
    intervals = []
    for score in scores:
        numbers.append(score.number)
        intervals.append(score.interval)
    mean = fmean(numbers) if numbers else math.nan
    return Value(mean, settings, mean_interval(numbers, intervals), is_main=False)


def read_harness_cells(content: Mapping[str, Any]) -> Cells:
    """Return the metrics in a result of lm-evaluation-harness as they are, and the scores of sets in percent."""
    # A result of the harness's own command does not name sets.
    found = summarize_results(content, content["config"].get("tasks") or list(SETS))
    cells: Cells = {}
    for task, of_task in list_metrics(found).items():
        for key, value in of_task.items():
            if "_stderr," not in key:
                cells[task, key.removesuffix(",none")] = (value, None)
    for name, value in found["scores"].items():
        cells[name, OF_SETS] = (value, None)
    return cells


def _parse_harness(file: Path, content: Mapping[str, Any]) -> Measured:
    """Return the values in a result of lm-evaluation-harness."""
    config = content["config"]
    numerics = Numerics.read(config)
    about = {"by": "harness"} | {name: value for name, value in config.items() if name in _PROMPTS}
    about |= {name: value for name, value in numerics._asdict().items() if value != NOT_RECORDED}
    shots = content.get("n-shot", {})  # by task; the harness's own command has no other record of them
    cells = read_harness_cells(content)
    # The harness's own command asks for tasks, which may happen to make a set.
    has_sets = bool(config.get("tasks")) and any(key == OF_SETS for _, key in cells)
    values = {}
    for (task, key), (number, _) in cells.items():
        settings = about | {"num_fewshot": shots.get(task, config.get("num_fewshot"))}
        name = task if key == OF_SETS else f"{task}/{key}"
        values[name] = Value(number, settings, is_main=key == OF_SETS or not has_sets)
    model = str(content.get("model_name") or "")
    return Measured(str(file), model, values, Provenance.read(config), numerics=numerics)


def _parse_table(file: Path, text: str) -> list[Measured]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    rows.fieldnames = names = list(map(str.strip, rows.fieldnames or ()))
    if "model" not in names or len(set(names)) < len(names):
        raise ValueError(f"it must have a column 'model', and no column twice; it has {names}")
    entries = []
    for row in rows:
        place = f"{file}:{rows.line_num}"
        if None in row:
            raise ValueError(f"{place} has more than {len(names)} cells: quote cells that contain a comma")
        model = ""
        values = {}
        for name, cell in row.items():
            text = (cell or "").strip()
            if name == "model":
                model = text
            elif text:
                values[known_name(name)] = Value(_parse_number(f"{place}: '{name}'", text))
        entries.append(Measured(place, model, values))
    if not entries:
        raise ValueError("it has no row of a model")
    return entries


def _parse_number(name: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {cell!r}") from None
