"""Read what commands of this project, and others, measured of models."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lightning_modules.tasks.evaluation.report import short
from lightning_modules.tasks.questions.registry import GROUPS

# Settings that values depend on: perplexities (LongPPL depends on all), and questions of our tasks and the harness's.
_TEXTS = ("texts", "max_tokens", "add_special_tokens")
_QUESTIONS = ("mode", "documents")
_PROMPTS = ("num_fewshot", "limit", "truncation")


class Measured(NamedTuple):
    """Values of a model that a file reports."""

    place: str  # file, with the line if it has several
    model: str  # name, hub id or folder
    values: dict[str, float]  # by name; NaN for what was measured and is not a number
    main: tuple[str, ...]  # names of the values that summarize the others, such as an average over tasks
    settings: dict[str, dict[str, Any]]  # for each value what it depends on: those of other settings are not comparable
    ours: bool = False  # whether the file is a result of ``longce evaluate``


def read_results(words: Sequence[str]) -> list[Measured]:
    """Read what files report, one entry per file and model.

    Each word is a file, a folder of ``longce evaluate`` or of other ``.csv`` and ``.json`` files, or ``NAME=FILE`` for
    results of a single model, which gets this name. The files are JSON of ``longce score --output``, ``results.json``
    and ``harness.json`` of ``longce evaluate``, a dictionary ``{"Qwen2-7B": {"LongBench": 42.0}}``, or CSV with a line
    for each model: its name in the column ``model``, and values in the others, where a cell may be blank.
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
        raise ValueError(f"No results at '{word}': give .json or .csv files, folders of them, or NAME=FILE.")
    entries = [entry for file in files for entry in _read_file(file)]
    if renamed:
        if (models := len({entry.model for entry in entries})) != 1:
            raise ValueError(f"'{path}' reports {models} models: rename them in the file, not by '{name}='.")
        entries = [entry._replace(model=name) for entry in entries]
    for entry in entries:
        if not entry.model:
            raise ValueError(f"{entry.place} does not name its model: give NAME={word}.")
    return entries


def _find_files(path: Path) -> list[Path]:
    if path.is_dir():
        evaluations = [path / name for name in ("results.json", "harness.json") if (path / name).is_file()]
        return evaluations or sorted([*path.glob("*.csv"), *path.glob("*.json")])
    return [path] if path.is_file() and path.suffix in (".csv", ".json") else []


def _read_file(file: Path) -> list[Measured]:
    """Read a file; ``model`` is empty where the file does not name it."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".csv":
            return _csv_entries(file, text)
        content = json.loads(text)
        for reader, names in _READERS:
            if names <= content.keys():
                return [reader(file, content)]
        return [_plain(str(file), model, entry) for model, entry in content.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else "a part is missing or has another form"
        raise ValueError(
            f"'{file}' is not JSON or CSV of results: {reason}. It must be a dictionary of models, each a dictionary of"
            " benchmarks and scores, a table of models, or a result of `longce score` or `longce evaluate`."
        ) from error


def _score(file: Path, content: Mapping[str, Any]) -> Measured:
    settings = dict(content.get("settings") or {})
    values = {name: _number(name, content[name]) for name in ("longppl", "perplexity")}
    depends_on = {"longppl": settings, "perplexity": {name: settings[name] for name in _TEXTS if name in settings}}
    return Measured(str(file), str(content.get("model") or ""), values, tuple(values), depends_on)


def _evaluation(file: Path, content: Mapping[str, Any]) -> Measured:
    """Read ``longce evaluate``: each task by length, and means over the lengths of tasks, of RULER and of LongEval."""
    if content.get("missing"):
        raise ValueError(
            f"it lacks the results of {content['missing']} questions: the same `longce evaluate` puts them"
        )
    tasks = {
        task: {int(length): _number(task, cell["mean"]) for length, cell in lengths.items()}
        for task, lengths in content["tasks"].items()
    }
    means = {"average": {int(length): _number("average", value) for length, value in content["average"].items()}}
    if longeval := next((tasks[task] for task in GROUPS["longeval"] if task in tasks), None):
        means = {"LongEval": longeval} | means
    told = {"by": "evaluate"} | {name: value for name, value in content["settings"].items() if name in _QUESTIONS}
    # A mean over other lengths is another value.
    lengths = told | {"lengths": sorted({length for scores in tasks.values() for length in scores})}
    values: dict[str, float] = {}
    settings: dict[str, dict[str, Any]] = {}
    if set(GROUPS["ruler"]) <= set(tasks):
        values["RULER"] = fmean(fmean(tasks[task].values()) for task in GROUPS["ruler"])
        settings["RULER"] = lengths
    for name, scores in (means | tasks).items():
        values[name] = fmean(scores.values()) if scores else math.nan
        settings[name] = told | {"lengths": sorted(scores)}
        for length, score in scores.items():
            at_length = f"{name} {short(length) if name == 'LongEval' else length}"
            values[at_length], settings[at_length] = score, told
    for name in ("weighted_inc", "weighted_dec", "answer_perplexity", "other_perplexity"):
        if content.get(name) is not None:
            values[name], settings[name] = _number(name, content[name]), lengths
    main = tuple(name for name in ("RULER", "LongEval") if name in values) or ("average",)
    return Measured(str(file), str(content.get("model") or ""), values, main, settings, ours=True)


def _harness(file: Path, content: Mapping[str, Any]) -> Measured:
    """Read tasks of lm-evaluation-harness: scores of sets in percent, metrics of tasks and groups as they are."""
    values = {name: _number(name, value) for name, value in content["scores"].items()}
    metrics = {name: entry["metrics"] for name, entry in content["tasks"].items()} | content["groups"]
    tasks = {
        f"{task}/{key.removesuffix(',none')}": _number(task, value)
        for task, entry in metrics.items()
        for key, value in entry.items()
        if "_stderr," not in key
    }
    given = content["settings"]
    told = {"by": "harness"} | {name: value for name, value in given.items() if name in _PROMPTS}
    settings = dict.fromkeys([*values, *tasks], told)
    if "RULER" in values:  # which is a mean over lengths
        settings["RULER"] = told | {"lengths": sorted(given.get("lengths", []))}
    return Measured(
        str(file), str(content.get("model") or ""), values | tasks, tuple(values or tasks), settings, ours=True
    )


# Readers of our results, and the keys by which each kind is recognized.
_READERS = (
    (_score, {"longppl", "documents"}),
    (_harness, {"tasks", "groups", "scores"}),
    (_evaluation, {"tasks", "average"}),
)


def _csv_entries(file: Path, text: str) -> list[Measured]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    rows.fieldnames = names = [name.strip() for name in rows.fieldnames or ()]
    if "model" not in names or len(set(names)) < len(names):
        raise ValueError(f"it has no column 'model', or names a column twice: {names}")
    entries = []
    for row in rows:
        place = f"{file}:{rows.line_num}"
        if None in row:
            raise ValueError(f"{place} has more than {len(names)} cells: quote cells that hold a comma")
        values = {name: cell.strip() for name, cell in row.items() if cell and cell.strip()}
        entries.append(_plain(place, values.pop("model", ""), values))
    if not entries:
        raise ValueError("it names columns and holds no model")
    return entries


def _plain(place: str, model: str, entry: Mapping[str, Any]) -> Measured:
    values = {name: _number(f"{place}: '{name}'", value) for name, value in entry.items() if value is not None}
    return Measured(place, model, values, tuple(values), {})


def _number(name: str, value: Any) -> float:
    """Read a number; our files write NaN as null."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
