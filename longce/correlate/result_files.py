"""Read the results of models that this project's commands and other tools measured."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_modules.models.loading.provenance import NOT_RECORDED, UNKNOWN, Numerics, Provenance, describe_key_tokens
from lightning_modules.scoring.records import Record, hash_texts, read_records, split_measurements, summarize
from lightning_modules.tasks.evaluation import answers
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE
from lightning_modules.tasks.evaluation.report import short
from lightning_modules.tasks.evaluation.summary import Cells
from lightning_modules.tasks.evaluation.summary import summarize as summarize_answers
from lightning_modules.tasks.harness.results import SETS, summarize_results
from lightning_modules.tasks.questions.registry import GROUPS
from lightning_modules.utilities.statistics import UNITS, Interval, mean_interval
from lightning_modules.utilities.tables import read_format

# Settings that values of the harness's tasks depend on.
_PROMPTS = ("num_fewshot", "limit", "truncation")

OF_SETS = "score, %"
"""Name of the score of a set of the harness's tasks among the metrics."""

_SUFFIXES = (".csv", ".json", ".parquet")

FILES = (ANSWERS_FILE, "results_*.json")
"""Patterns of the files in a folder of ``longce evaluate``: answers, and the results of lm-evaluation-harness."""


class Measured(NamedTuple):
    """Values of a model from one file."""

    place: str  # file, with the line if it has several
    model: str  # name, hub id or folder
    values: dict[str, float]  # by name; NaN if the measurement is not a number
    main: tuple[str, ...]  # names of the values that summarize the others, such as an average over tasks
    settings: dict[str, dict[str, Any]]  # settings on which each value depends, and which must be equal to compare it
    ours: bool = False  # whether the file is a result of ``longce evaluate``
    intervals: Mapping[str, Interval | None] = MappingProxyType({})  # 95% intervals of scores
    provenance: Provenance | None = None  # of the model, if the file has it
    key_tokens: str = ""  # how the key tokens of LongPPL were found
    numerics: Numerics = UNKNOWN  # dtype, precision and attention of the model


def read_results(words: Sequence[str]) -> list[Measured]:
    """Read result files, with one entry per file and model.

    Each word is a file, a folder of ``longce evaluate``, of such folders or of other files, or ``NAME=FILE`` for
    results of a single model, which gets this name. The files are records of ``longce score --output``,
    ``answers.parquet`` of ``longce evaluate``, ``results_*.json`` of lm-evaluation-harness, a dictionary
    ``{"Qwen2-7B": {"LongBench": 42.0}}``, or CSV with a line for each model: its name in the column ``model``, and
    values in the others, where a cell may be blank.
    """
    return [entry for word in words for entry in _read_word(word)]


def is_perplexity(name: str) -> bool:
    """Return whether a value is a perplexity, by its name."""
    return any(part in name.lower() for part in ("ppl", "perplexity", "bits_per_byte"))


def _read_word(word: str) -> list[Measured]:
    name, equals, path = word.partition("=")
    renamed = bool(equals) and not Path(word).expanduser().exists()
    files = _find_files(Path(path if renamed else word).expanduser())
    if not files or (renamed and not name):
        raise ValueError(
            f"No results at '{word}': pass .parquet, .json or .csv files, folders that contain them, or NAME=FILE."
        )
    entries = [entry for file in files for entry in _read_file(file)]
    if renamed:
        if (models := len({entry.model for entry in entries})) != 1:
            raise ValueError(f"'{path}' has {models} models: rename them in the file instead of by '{name}='.")
        entries = [entry._replace(model=name) for entry in entries]
    for entry in entries:
        if not entry.model:
            raise ValueError(f"{entry.place} does not name its model: use NAME={word}.")
    return entries


def _find_files(path: Path) -> list[Path]:
    if path.is_dir():
        found, inner = ([file for name in FILES for file in sorted(path.glob(place + name))] for place in ("", "*/"))
        return found or sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES) or inner
    return [path] if path.is_file() and path.suffix in _SUFFIXES else []


def _read_file(file: Path) -> list[Measured]:
    """Read a file; ``model`` is empty if the file does not name it."""
    if file.suffix == ".parquet":
        return _read_answers(file) if read_format(file) == answers.FORMAT else _read_records(file)
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".csv":
            return _csv_entries(file, text)
        content = json.loads(text)
        if {"longppl", "documents"} <= content.keys():
            raise ValueError("it is a result of longce 0.1: `longce score --output` writes records (.parquet) now")
        if "tasks" in content and {"average", "scores"} & content.keys():
            raise ValueError(
                "it is a result of longce 0.1: `longce evaluate` writes answers.parquet and results_*.json"
            )
        if {"results", "n-shot", "n-samples"} <= content.keys():
            return [_read_harness(file, content)]
        return [_parse_values(str(file), model, entry) for model, entry in content.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else "a key is missing or has the wrong type"
        raise ValueError(
            f"'{file}' is not JSON or CSV of results: {reason}. It must be a dictionary of models, each a dictionary of"
            " benchmarks and scores, a table of models, or a result of `longce score` or `longce evaluate`."
        ) from error


def _read_records(file: Path) -> list[Measured]:
    """Read the records of ``longce score``, with an entry for each model and definition of key tokens."""
    return [_summarize(file, records) for records in split_measurements(read_records(file))]


def _summarize(file: Path, records: Sequence[Record]) -> Measured:
    total = summarize(records)
    first = records[0]
    model = first.model
    evaluator = first.evaluator
    numerics = model.numerics._asdict()
    # Set, stage and step of a run; empty for a stored model.
    place = {name: getattr(first, name) for name in ("set", "stage", "step") if getattr(first, name)}
    texts = {**place, "texts": hash_texts(records), "add_special_tokens": model.special_tokens, **numerics}
    settings = texts | {
        "evaluator": evaluator.name,
        "evaluator_add_special_tokens": evaluator.special_tokens,
        **first.definition._asdict(),
        **{f"evaluator.{name}": value for name, value in evaluator.provenance._asdict().items()},
    }
    values: dict[str, float] = {name: getattr(total, name) for name in UNITS}
    depends_on = {name: texts if name in ("perplexity", "bits_per_byte") else settings for name in values}
    if total.soft_weight:
        thresholds = ("alpha", "beta", "key_token_rule")
        depends_on["longppl_soft"] = {name: value for name, value in settings.items() if name not in thresholds}
    else:  # unknown, such as by `--key_tokens_only`
        del values["longppl_soft"], depends_on["longppl_soft"]
    return Measured(
        str(file),
        model.name,
        values,
        tuple(values),
        depends_on,
        provenance=model.provenance,
        key_tokens=describe_key_tokens(settings, evaluator.provenance),
        numerics=model.numerics,
    )


def _read_numerics(values: Mapping[str, Any]) -> dict[str, str]:
    """Return those of dtype, precision and attention that a result has: values of others are other metrics."""
    return {name: value for name, value in Numerics.read(values)._asdict().items() if value != NOT_RECORDED}


def read_harness_cells(content: Mapping[str, Any]) -> Cells:
    """Return the metrics in a result of lm-evaluation-harness as they are, and the scores of sets in percent."""
    # A result of the harness's own command does not name sets.
    found = summarize_results(content, content["config"].get("tasks") or list(SETS))
    metrics = {name: entry["metrics"] for name, entry in found["tasks"].items()} | found["groups"]
    cells: Cells = {}
    for task, of_task in metrics.items():
        for key, value in of_task.items():
            if "_stderr," not in key:
                cells[task, key.removesuffix(",none")] = (value, None)
    for name, value in found["scores"].items():
        cells[name, OF_SETS] = (value, None)
    return cells


def _read_answers(file: Path) -> list[Measured]:
    """Read the answers of ``longce evaluate`` or `LongContextTasks`, with an entry for each model, setting and step."""
    return [_summarize_answers(file, found) for found in answers.split_evaluations(answers.read_answers(file))]


def _summarize_answers(file: Path, found: Sequence[answers.Answer]) -> Measured:
    """Return the scores of each task by length, and means over the lengths of tasks, of RULER and of LongEval."""
    summary = summarize_answers(found)
    first = found[0]
    if summary.missing:
        raise ValueError(
            f"{summary.missing} questions in '{file}' have no answer: run the same `longce evaluate` again to complete"
            " them."
        )
    by_task = _group_by_task(summary.cells())
    numerics = first.model.numerics
    told = {"by": "evaluate", **first.setting._asdict(), **numerics._asdict()}
    # Means over different lengths are not comparable.
    lengths = told | {"lengths": sorted({length for cells in by_task.values() for length in cells})}
    values: dict[str, float] = {}
    intervals: dict[str, Interval | None] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name, cells in by_task.items():
        means = [mean for mean, _ in cells.values()]
        ends = [interval for _, interval in cells.values()]
        values[name] = fmean(means) if means else math.nan
        intervals[name] = mean_interval(means, ends)
        settings[name] = told | {"lengths": sorted(cells)}
        for length, (mean, interval) in cells.items():
            at_length = f"{name} {short(length) if name == 'LongEval' else length}"
            values[at_length] = mean
            intervals[at_length] = interval
            settings[at_length] = told
    if set(GROUPS["ruler"]) <= set(by_task):
        means = [values[task] for task in GROUPS["ruler"]]
        ends = [intervals[task] for task in GROUPS["ruler"]]
        values["RULER"] = fmean(means)
        intervals["RULER"] = mean_interval(means, ends)
        settings["RULER"] = lengths
    others = {"weighted_inc": summary.weighted_inc, "weighted_dec": summary.weighted_dec}
    if summary.perplexities:
        others |= summary.perplexities[None, None]._asdict()
    for name, value in others.items():
        if math.isfinite(value):
            values[name] = value
            settings[name] = lengths
    main = tuple(name for name in ("RULER", "LongEval") if name in values) or ("average",)
    provenance = first.model.provenance if first.model.identity else None  # unknown for a model in training
    return Measured(
        str(file),
        first.model.name,
        values,
        main,
        settings,
        ours=True,
        intervals=intervals,
        provenance=provenance,
        numerics=numerics,
    )


def _group_by_task(cells: Cells) -> dict[str, dict[int, tuple[float, Interval | None]]]:
    """Return the scores by task and length, of the average over tasks and of LongEval as well."""
    found: dict[str, dict[int, tuple[float, Interval | None]]] = {"average": {}}
    for (task, length), cell in cells.items():
        for name in (task, "LongEval") if task in GROUPS["longeval"] else (task,):
            found.setdefault(name, {})[int(length)] = cell
    return found


def _read_harness(file: Path, content: Mapping[str, Any]) -> Measured:
    """Read tasks of lm-evaluation-harness."""
    given = content["config"]
    told = {"by": "harness"} | {name: value for name, value in given.items() if name in _PROMPTS}
    told |= _read_numerics(given)
    shots = content.get("n-shot", {})  # by task; the harness's own command has no other record of them
    values: dict[str, float] = {}
    settings: dict[str, dict[str, Any]] = {}
    sets = []
    for (task, key), (value, _) in read_harness_cells(content).items():
        name = task if key == OF_SETS else f"{task}/{key}"
        values[name] = value
        settings[name] = told | {"num_fewshot": shots.get(task, given.get("num_fewshot"))}
        # The harness's own command asks for tasks, which may happen to make a set.
        if key == OF_SETS and given.get("tasks"):
            sets.append(name)
    identity: Any = {"provenance": Provenance.read(given), "numerics": Numerics.read(given)}
    model = str(content.get("model_name") or "")
    return Measured(str(file), model, values, tuple(sets or values), settings, ours=True, **identity)


def _csv_entries(file: Path, text: str) -> list[Measured]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
    records = [(rows.line_num, row) for row in rows]
    if "model" not in names or len(set(names)) < len(names) or not records:
        raise ValueError(f"it must have a column 'model', no column twice, and a row for each model; it has {names}")
    entries = []
    for number, row in records:
        place = f"{file}:{number}"
        if None in row:
            raise ValueError(f"{place} has more than {len(names)} cells: quote cells that contain a comma")
        values = {name: cell.strip() for name, cell in row.items() if cell and cell.strip()}
        entries.append(_parse_values(place, values.pop("model", ""), values))
    return entries


def _parse_values(place: str, model: str, entry: Mapping[str, Any]) -> Measured:
    values = {name: _parse_number(f"{place}: '{name}'", value) for name, value in entry.items() if value is not None}
    return Measured(place, model, values, tuple(values), {})


def _parse_number(name: str, value: Any) -> float:
    """Convert a value to a number; our result files have null for NaN."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
