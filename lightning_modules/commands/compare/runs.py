"""Read what is compared: folders of `longce fit` and `longce evaluate`, and JSON files of `longce score`."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from tensorboard.compat.proto.event_pb2 import Event

from lightning_modules.commands.compare.evaluations import ComparedEvaluation, read_evaluation
from lightning_modules.commands.correlate.result_files import FILES
from lightning_modules.models.loading.provenance import UNKNOWN, Numerics, Provenance
from lightning_modules.tasks.evaluation.evaluation import SETTINGS
from lightning_modules.training.checkpoints.spans import read_spans
from lightning_modules.training.monitoring.event_files import list_event_files, read_records
from lightning_modules.training.monitoring.numerics import read_numerics
from lightning_modules.utilities.identity import shorten_hashes
from lightning_modules.utilities.statistics import UNITS

AXES = {"optimizer steps": "step", "tokens": "train/tokens", "device hours": "train/gpu_hours"}
"""Measures of the progress of a training, each with its scalar."""

_COLUMNS = [*dict.fromkeys(name for pair in UNITS.items() for name in pair)]
_PATHS = re.compile(r"run\.id$|.*\.(dirpath|\w+_dir)$")  # settings that always differ
_KEY_TOKENS = ("alpha", "beta", "context_length", "stride", "key_token_rule")
"""Columns of a table of documents that describe how key tokens were found."""

_STAGES = {"val": "validation", "test": "test"}


class ComparedRun(NamedTuple):
    """A run, or a model that was scored.

    Evaluations are tables of documents, by set, evaluator, thresholds and the model's numerics, which a text names, and
    by optimizer step.
    """

    name: str
    evaluations: dict[str, dict[int, pd.DataFrame]]
    config: dict[str, str]
    scalars: dict[str, dict[int, float]]  # by optimizer step
    numerics: dict[str, Numerics] = {}  # noqa: RUF012, it is never changed. By the names of evaluations

    def last(self, cell: str) -> tuple[int, pd.DataFrame]:
        """Return the last evaluation of a cell and its step."""
        return max(self.evaluations[cell].items(), key=lambda each: each[0])


def read_compared(words: Sequence[str | Path]) -> list[ComparedRun | ComparedEvaluation]:
    """Read what is compared, each given as ``PATH`` or ``NAME=PATH``.

    A path is the folder of a run, a folder of ``longce evaluate``, a result of ``longce score``, or a folder of such
    results or folders.

    Raises:
        ValueError: If a path is none of them, if names are repeated, or if several kinds are mixed.
    """
    found = [(name, path) for word in words for name, path in _find_files(str(word))]
    paths = [path for _, path in found]
    kinds = {path: _read_score if path.is_file() else _read_run if _is_run(path) else read_evaluation for path in paths}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            "Give either folders of runs, or results of `longce score`, or folders of `longce evaluate`: they cannot be"
            " compared with each other."
        )
    common = os.path.commonpath([path.parent for path in paths])
    names = [name or str(path.relative_to(common)).removesuffix(".json") for name, path in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"Two runs have the name '{repeated}': give each run once, or another name (NAME=RUN).")
    return [kinds[path](name, path) for name, path in zip(names, paths, strict=True)]


def read_runs(words: Sequence[str | Path]) -> list[ComparedRun]:
    """Read runs and results of ``longce score``, as `read_compared` does."""
    return [run for run in read_compared(words) if isinstance(run, ComparedRun)]


def _find_files(word: str) -> Iterator[tuple[str, Path]]:
    """Yield the run or the results at a path, with the name that the user gave."""
    name, _, given = ("", "", word) if "=" not in word or Path(word).exists() else word.partition("=")
    path = Path(given).expanduser().resolve()
    found = [path] if path.is_file() or _is_run(path) or _is_evaluation(path) else sorted(path.glob("*.json"))
    found = found or [inner for inner in sorted(path.glob("*/")) if _is_evaluation(inner)]
    if (path / SETTINGS).is_file() and not _is_evaluation(path):
        raise ValueError(f"The evaluation in '{word}' was interrupted: run the same `longce evaluate` again.")
    if not found:
        inside = ", ".join(sorted(str(file.parent) for file in path.glob("*/config.yaml"))) or "runs/longce/version_0"
        raise ValueError(
            f"'{word}' is not a run: give a folder with config.yaml ({inside}), a folder of `longce evaluate`, or"
            " JSON of `longce score`."
        )
    yield from ((name, file) for file in found)


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _is_evaluation(path: Path) -> bool:
    return any((path / file).is_file() for file in FILES)


def _read_run(run_name: str, folder: Path) -> ComparedRun:
    hparams = yaml.safe_load((folder / "hparams.yaml").read_text()) if (folder / "hparams.yaml").is_file() else {}
    names = {key: key.replace(".init_args", "").removesuffix(".class_path") for key in hparams if not _PATHS.match(key)}
    config = {name: str(hparams[key]) for key, name in names.items()} | _describe_resumes(folder)
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    evaluations: dict[str, dict[int, pd.DataFrame]] = defaultdict(dict)
    numerics: dict[str, Numerics] = {}
    evaluated: dict[tuple[str, int], Numerics] = {}  # numerics of scalars, by name and step
    for place in (folder, *sorted(folder.glob("evaluations/*"), key=os.path.getmtime)):
        recorded = read_numerics(place)
        for key, step, value in _read_scalars(place):
            # Lightning numbers steps from 0, but evaluations before training and of checkpoints are at their step.
            exact = place != folder or (step == 0 and key.startswith("val/"))
            step = step if exact else step + 1
            scalars[key][step] = value
            evaluated[key, step] = recorded.get(step, UNKNOWN)
        for cell, by_model, step, documents in _read_documents(place):
            name = _add_numerics(cell, by_model)
            evaluations[name][step] = documents
            numerics[name] = by_model
    for key, values in {} if evaluations else scalars.items():  # as if they were of a single document
        if found := re.fullmatch(r"(val|test)/(?:(.+)/)?(longppl|perplexity)", key):
            for step, value in values.items():
                name = _add_numerics(found[2] or _STAGES[found[1]], evaluated[key, step])
                steps = evaluations[name]
                numerics[name] = evaluated[key, step]
                row = pd.DataFrame([{"document": "all documents", "tokens": 1.0, "key_tokens": 1.0}])
                steps.setdefault(step, _index(row))[found[3]] = value
    scalars["step"] = {step: step for steps in (*scalars.values(), *evaluations.values()) for step in steps}
    return ComparedRun(run_name, dict(evaluations), config, dict(scalars), numerics)


def _describe_resumes(folder: Path) -> dict[str, str]:
    """Return the settings that changed when a run resumed, with the values and the steps from which they applied."""
    found: dict[str, str] = {}
    for span in read_spans(folder):
        for key, (before, after) in span.changed.items():
            name = key.replace(".init_args", "").removesuffix(".class_path")
            found[name] = f"{found.get(name, before)}, from step {span.step} on {after}"
    return found


def _read_scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield name, logged step and value of the scalars of TensorBoard and of CSV files, oldest first."""
    for file in list_event_files(folder):
        for _, content in read_records(file):
            event = Event.FromString(content)
            found = (value for value in event.summary.value if value.HasField("simple_value"))
            yield from ((value.tag, event.step, value.simple_value) for value in found)
    if (table := folder / "metrics.csv").is_file():
        logged = pd.read_csv(table).drop(columns="epoch", errors="ignore").melt("step").dropna(subset="value")
        yield from zip(logged["variable"], logged["step"], logged["value"], strict=True)


def _read_documents(folder: Path) -> Iterator[tuple[str, Numerics, int, pd.DataFrame]]:
    """Yield the evaluations of a folder that have a table of documents, with the model's numerics."""
    spans = [span for span in read_spans(folder) if span.config]
    settings = {span.step: _read_evaluators(folder / span.config) for span in spans}
    for file in sorted(folder.glob("documents/*.parquet")):
        stage_and_name, _, step = file.stem.rpartition("-step-")
        stage, _, name = stage_and_name.partition("-")
        for (group, thresholds), rows in pd.read_parquet(file).groupby(["set", "thresholds"]):
            row = rows.iloc[0].to_dict()
            in_effect = settings[max((first for first in settings if first <= int(step)), default=min(settings))]
            values = in_effect.get(name, {}) | {key: row[key] for key in _KEY_TOKENS if key in row}
            evaluator = Provenance.read(row, "evaluator_")
            cell = _name_cell(group or _STAGES[stage], name, thresholds, values, evaluator)
            yield cell, Numerics.read(row, "model_"), int(step), _index(rows)


def _read_evaluators(config: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of the evaluators in a config, by their names."""
    callbacks = yaml.safe_load(config.read_text())["trainer"].get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    arguments = [each["init_args"] for each in callbacks if each["class_path"] == "callbacks.ExternalEvaluator"]
    return {each.get("name") or "evaluator": each for each in arguments}


def _read_score(name: str, file: Path) -> ComparedRun:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return make_scored_run(name, content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{file}' is not a run or a result of `longce score --output` ({error!r}).") from error


def make_scored_run(name: str, content: Mapping[str, Any]) -> ComparedRun:
    """Return a result of `longce score` as a run with one evaluation."""
    rows = pd.DataFrame(content["documents"]).rename(columns={"file": "document"})
    rows["tokens"] -= 1  # the first token of a document is not scored
    settings = content["settings"]
    models = content.get("provenance", {})
    cell = _name_cell(f"texts {settings['texts'][:8]}", "", "", settings, Provenance.read(models.get("evaluator", {})))
    config = settings | {f"{kind}.{key}": value for kind, found in models.items() for key, value in found.items()}
    numerics = Numerics.read(models.get("model", {}))
    cell = _add_numerics(cell, numerics)
    described = {key: shorten_hashes(str(value)) for key, value in config.items()}
    return ComparedRun(name, {cell: {0: _index(rows)}}, described, {}, {cell: numerics})


def _name_cell(
    documents: str, name: str, thresholds: str, settings: Mapping[str, Any], evaluator: Provenance | None
) -> str:
    """Return a name that differs if set, evaluator, K, d, thresholds or rule differ, so that numbers are not compared.

    Evaluators differ if their content, dtype or attention does.
    """
    model = Path(settings.get("evaluator") or name).name
    judge = model if name in ("", "evaluator") else f"{name}: {model}"
    sizes = [str(evaluator)] if evaluator else []
    sizes += [
        f"{symbol} {settings[key]}" for symbol, key in (("K", "context_length"), ("d", "stride")) if key in settings
    ]
    sizes += ["rule: authors"] if settings.get("key_token_rule", settings.get("key_tokens")) == "authors" else []
    values = f"alpha {settings['alpha']:g}, beta {settings['beta']:g}"
    named = f"{thresholds} ({values})" if thresholds else values
    return f"{documents}, {judge} ({', '.join(sizes)}), {named}".replace(" ()", "")


def _add_numerics(cell: str, numerics: Numerics) -> str:
    return cell if numerics == UNKNOWN else f"{cell} [{numerics}]"


def shorten_cell(cell: str) -> str:
    """Return the set, the evaluator's name and the thresholds, without what identifies the evaluator's weights.

    Example:
        >>> shorten_cell("books, judge: qwen (sha256:aa, K 64), loose (alpha 1, beta -2)")
        'books, judge: qwen, loose (alpha 1, beta -2)'
    """
    before, _, rest = cell.partition(" (")
    return f"{before},{rest.partition('),')[2]}" if "), " in rest else cell


def describe_evaluator(cell: str) -> str:
    """Return the evaluator of an evaluation and what identifies it, or nothing if only its name is known.

    Example:
        >>> describe_evaluator("books, judge: qwen (sha256:aa, K 64), loose (alpha 1, beta -2)")
        'judge: qwen (sha256:aa, K 64)'
    """
    found = re.search(r", ([^,()]+ \([^()]*\)), ", cell)
    return found[1] if found else ""


def _index(rows: pd.DataFrame) -> pd.DataFrame:
    """Index documents by name and occurrence, because a name may occur several times.

    Besides the numbers, there is a hash of each text. In results of older versions it is empty, and bits are NaN.
    """
    indexed = rows.set_index([rows["document"], rows.groupby("document").cumcount()])
    hashes = indexed["text_sha256"] if "text_sha256" in rows else ""
    return indexed.reindex(columns=_COLUMNS).astype(float).assign(text_sha256=hashes)
