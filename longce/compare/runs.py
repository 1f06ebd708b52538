"""Read the results to compare: folders of `longce fit` and `longce evaluate`, and records of `longce score`."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from lightning_modules.models.loading.provenance import UNKNOWN, Numerics
from lightning_modules.scoring.records import (
    FOLDER,
    Record,
    Source,
    hash_texts,
    measured_model,
    measurement_settings,
    read_records,
    split_measurements,
)
from lightning_modules.tasks.evaluation.answers import FOLDER as ANSWERS_FOLDER
from lightning_modules.tasks.evaluation.answers import FORMAT as ANSWERS_FORMAT
from lightning_modules.training.checkpoints.spans import read_spans
from lightning_modules.training.monitoring.numerics import read_numerics
from lightning_modules.utilities.identity import shorten_hashes
from lightning_modules.utilities.statistics import UNITS
from lightning_modules.utilities.tables import read_format
from longce.compare.evaluations import ComparedEvaluation, read_evaluation
from longce.compare.scalars import read_scalars, split_numbers
from longce.correlate.result_files import list_files, split_name

AXES = {"optimizer steps": "step", "tokens": "train/tokens", "device hours": "train/gpu_hours"}
"""Measures of the progress of a training, each with its scalar."""

_PATHS = re.compile(r"run\.id$|.*\.(dirpath|\w+_dir)$")  # settings that always differ

WHOLE_SET = "all documents"
"""Only row of the table of a run without records by document, which has the logged numbers of the whole set."""

_STAGES = {"val": "validation", "test": "test"}


class Cell(NamedTuple):
    """Settings that must be equal to compare numbers of two models."""

    set: str  # of documents
    evaluator: str = ""  # name
    thresholds: str = ""
    details: str = ""  # identity of the evaluator, with K, d and rule
    numerics: Numerics = UNKNOWN  # of the model


class ComparedRun(NamedTuple):
    """A run, or a model that was scored.

    Evaluations are tables of documents, by cell and optimizer step. A run without records by document has tables with
    one row, for the whole set.
    """

    name: str
    evaluations: dict[Cell, dict[int, pd.DataFrame]]
    config: dict[str, str]
    scalars: dict[str, dict[int, float]]  # by optimizer step

    def last(self, cell: Cell) -> tuple[int, pd.DataFrame]:
        """Return the last evaluation of a cell and its step."""
        steps = self.evaluations[cell]
        return max(steps), steps[max(steps)]


def name_cells(runs: Sequence[ComparedRun]) -> tuple[dict[Cell, str], str]:
    """Return names of cells by which they can be told apart, and a sentence that identifies the evaluators.

    A name has the evaluator's identity only if two evaluators of one name differ, for example in K or the dtype, and
    the model's numerics only if these differ.
    """
    cells = list_cells(runs)
    evaluators: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        if cell.details:
            evaluators[cell.evaluator].add(cell.details)
    ambiguous = any(len(identities) > 1 for identities in evaluators.values())
    numerics_differ = len({cell.numerics for cell in cells}) > 1
    names = {}
    cells += [Cell(cell.set, numerics=cell.numerics) for cell in cells]  # for perplexity, which has no evaluator
    for cell in cells:
        evaluator = cell.evaluator
        if ambiguous and cell.details:
            evaluator += f" ({cell.details})"
        name = ", ".join(filter(None, (cell.set, evaluator, cell.thresholds)))
        if numerics_differ and cell.numerics != UNKNOWN:
            name += f" [{cell.numerics}]"
        names[cell] = name
    if ambiguous or not evaluators:
        return names, ""
    described = [f"{name} ({details})" for name, (details,) in evaluators.items()]
    noun = "Evaluator" if len(described) == 1 else "Evaluators"
    return names, f"{noun}: {'; '.join(described)}."


def list_cells(runs: Sequence[ComparedRun]) -> list[Cell]:
    """Return the cells of all runs, each once."""
    return list(dict.fromkeys(chain.from_iterable(run.evaluations for run in runs)))


def read_compared(words: Sequence[str | Path]) -> list[ComparedRun | ComparedEvaluation]:
    """Read the results to compare, each given as ``PATH`` or ``NAME=PATH``.

    A path is the folder of a run, a folder of ``longce evaluate`` or a file of its answers, records of ``longce
    score``, or a folder of such files or folders. Records of several models are compared with each other.

    Raises:
        ValueError: If a path is of another kind, if names are repeated, or if several kinds are mixed.
    """
    found = []
    for word in words:
        found += _find_files(str(word))
    if len({_find_kind(path) for _, path in found}) > 1:
        raise ValueError(
            "Give either folders of runs, or records of `longce score`, or folders of `longce evaluate`: they cannot be"
            " compared with each other."
        )
    common = os.path.commonpath([path.parent for _, path in found])
    compared: list[ComparedRun | ComparedEvaluation] = []
    for name, path in found:
        default = str(path.relative_to(common)).removesuffix(".parquet")
        kind = _find_kind(path)
        if kind == "records":
            compared += _read_scored(name, path, default)
        elif kind == "run":
            compared.append(_read_run(name or default, path))
        else:
            compared.append(read_evaluation(name or default, path))
    names = [each.name for each in compared]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two runs have the name '{name}': give each run once, or another name (NAME=RUN).")
    return compared


def read_runs(words: Sequence[str | Path]) -> list[ComparedRun]:
    """Read runs and records of ``longce score``, as `read_compared` does."""
    return [run for run in read_compared(words) if isinstance(run, ComparedRun)]


def _find_files(word: str) -> list[tuple[str, Path]]:
    """Return the run or the results at a path, with the name that the user gave."""
    name, given = split_name(word)
    path = given.resolve()
    if path.is_file() or _is_run(path) or list_files(path):
        return [(name, path)]
    found = sorted(path.glob("*.parquet"), key=split_numbers)
    if not found:
        found = [inner for inner in sorted(path.glob("*/")) if list_files(inner)]
    if not found and (path / ANSWERS_FOLDER).is_dir():
        raise ValueError(f"The evaluation in '{word}' was interrupted: run the same `longce evaluate` again.")
    if not found:
        runs = sorted(str(file.parent) for file in path.glob("*/config.yaml"))
        inside = ", ".join(runs) or "runs/longce/version_0"
        raise ValueError(
            f"'{word}' is not a run: give a folder with config.yaml ({inside}), a folder of `longce evaluate`, or"
            " records of `longce score`."
        )
    return [(name, file) for file in found]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _find_kind(path: Path) -> str:
    if _is_run(path):
        return "run"
    if path.is_file() and path.suffix != ".parquet":
        raise ValueError(
            f"'{path}' cannot be compared: give the folder of a run or of `longce evaluate`, or records (.parquet)."
            " Results of longce 0.1 (.json) are not supported."
        )
    if path.is_file() and read_format(path) != ANSWERS_FORMAT:
        return "records"
    return "evaluation"


def _read_run(run_name: str, folder: Path) -> ComparedRun:
    scalars: dict[str, dict[int, float]] = defaultdict(dict)
    evaluations: dict[Cell, dict[int, pd.DataFrame]] = defaultdict(dict)
    evaluated: dict[tuple[str, int], Numerics] = {}  # numerics of scalars, by name and step
    # Repeated evaluations of a step are numbered; the times of a copied folder may be in any order.
    for place in (folder, *sorted(folder.glob("evaluations/*"), key=split_numbers)):
        recorded = read_numerics(place)
        for key, step, value in read_scalars(place):
            # Lightning numbers steps from 0, but evaluations before training and of checkpoints are at their step.
            # So are those of `LongContextTasks` after N steps, which begin no step of their own.
            exact = place != folder or key.startswith(("tasks/", "harness/")) or (step == 0 and key.startswith("val/"))
            step = step if exact else step + 1
            scalars[key][step] = value
            evaluated[key, step] = recorded.get(step, UNKNOWN)
        for file in sorted(place.glob(f"{FOLDER}/*.parquet")):
            for records in split_measurements(read_records(file)):
                evaluations[_find_cell(records)][records[0].step] = tabulate_documents(records)
    if not evaluations:
        evaluations = _tabulate_scalars(scalars, evaluated)
    steps = dict.fromkeys(chain(*scalars.values(), *evaluations.values()))
    scalars["step"] = {step: step for step in steps}
    return ComparedRun(run_name, dict(evaluations), _read_config(folder), dict(scalars))


def _tabulate_scalars(
    scalars: Mapping[str, Mapping[int, float]], evaluated: Mapping[tuple[str, int], Numerics]
) -> dict[Cell, dict[int, pd.DataFrame]]:
    """Return the logged numbers of whole sets as evaluations, with the numerics of each by name and step."""
    evaluations: dict[Cell, dict[int, pd.DataFrame]] = defaultdict(dict)
    for key, values in scalars.items():
        found = re.fullmatch(r"(val|test)/(?:(.+)/)?(longppl|perplexity)", key)
        if not found:
            continue
        for step, value in values.items():
            cell = Cell(found[2] or _STAGES[found[1]], numerics=evaluated[key, step])
            row = pd.DataFrame([{"document": WHOLE_SET, "tokens": 1.0, "key_tokens": 1.0}])
            evaluations[cell].setdefault(step, _index(row))[found[3]] = value
    return evaluations


def _read_config(folder: Path) -> dict[str, str]:
    """Return the settings of a run as texts, without those that always differ."""
    config = {}
    file = folder / "hparams.yaml"
    if file.is_file():
        for key, value in yaml.safe_load(file.read_text()).items():
            if not _PATHS.match(key):
                config[_trim_key(key)] = str(value)
    return config | _describe_resumes(folder)


def _trim_key(key: str) -> str:
    return key.replace(".init_args", "").removesuffix(".class_path")


def _describe_resumes(folder: Path) -> dict[str, str]:
    """Return the settings that changed when a run resumed, with the values and the steps from which they applied."""
    found: dict[str, str] = {}
    for span in read_spans(folder):
        for key, (before, after) in span.changed.items():
            name = _trim_key(key)
            found[name] = f"{found.get(name, before)}, from step {span.step} on {after}"
    return found


def _find_cell(records: Sequence[Record]) -> Cell:
    """Return the cell of a measurement; those of different evaluators, definitions or numerics differ.

    Evaluators differ if their content, dtype or attention does, or whether special tokens precede the text.
    """
    record = records[0]
    definition = record.definition
    evaluator = Path(record.evaluator.name).name
    if record.evaluator_label:
        evaluator = f"{record.evaluator_label}: {evaluator}"
    details = [str(record.evaluator.provenance)]
    if definition.context_length:
        details += [f"K {definition.context_length}", f"d {definition.stride}"]
        if not record.evaluator.special_tokens:
            details.append("no special tokens")
    if definition.key_token_rule == "authors":
        details.append("rule: authors")
    thresholds = f"alpha {definition.alpha:g}, beta {definition.beta:g}"
    if record.thresholds_label:
        thresholds = f"{record.thresholds_label} ({thresholds})"
    return Cell(
        set=record.set or _STAGES.get(record.stage, f"texts {hash_texts(records)[:8]}"),
        evaluator=evaluator,
        thresholds=thresholds,
        details=", ".join(filter(None, details)),
        numerics=record.model.numerics,
    )


def _read_scored(name: str, file: Path, default: str) -> list[ComparedRun]:
    """Read the records of ``longce score``: a run for each model, by the given name, the file's or the models'."""
    by_model: dict[Source, list[Record]] = {}
    for record in read_records(file):
        by_model.setdefault(measured_model(record), []).append(record)
    if not by_model:
        raise ValueError(f"'{file}' has no records.")
    if len(by_model) == 1:
        return [make_scored_run(name or default, records) for records in by_model.values()]
    if name:
        raise ValueError(f"'{name}={file}' names one model, but the file has {len(by_model)}: give it without a name.")
    full = [model.name for model in by_model]
    short = [Path(model).name for model in full]
    names = short if len(set(short)) == len(short) else full
    return [make_scored_run(each, records) for each, records in zip(names, by_model.values(), strict=True)]


def make_scored_run(name: str, records: Sequence[Record]) -> ComparedRun:
    """Return records of one model as a run, with an evaluation for each measurement."""
    evaluations: dict[Cell, dict[int, pd.DataFrame]] = defaultdict(dict)
    values: dict[str, set[str]] = defaultdict(set)
    for measured in split_measurements(records):
        first = measured[0]
        evaluations[_find_cell(measured)][first.step] = tabulate_documents(measured)
        settings = measurement_settings(measured)
        for key, value in first.model.provenance._asdict().items():
            settings[f"model.{key}"] = value
        for key, value in settings.items():
            values[key].add(shorten_hashes(str(value)))
    # Several measurements of a model are separate rows; settings that differ among them do not distinguish models.
    config = {key: min(found) for key, found in values.items() if len(found) == 1}
    return ComparedRun(name, dict(evaluations), config, {})


def tabulate_documents(records: Iterable[Record]) -> pd.DataFrame:
    """Return the numbers of documents and their units, with a row for each record."""
    rows = []
    for record in records:
        row: dict[str, float | str] = {"document": record.document, "text_sha256": record.text_sha256}
        for kind, unit in UNITS.items():
            row[kind] = getattr(record.sums, kind)
            row[unit] = getattr(record.sums, unit)
        rows.append(row)
    return _index(pd.DataFrame(rows))


def has_documents(table: pd.DataFrame) -> bool:
    """Return whether a table has a row for each document, and not one for the whole set."""
    # Documents are indexed by the hashes of their texts, so none of them can have this index.
    return WHOLE_SET not in table.index.get_level_values(0)


def _index(rows: pd.DataFrame) -> pd.DataFrame:
    """Index documents by the hash of their text and its occurrence; by name where a result has no texts."""
    texts = rows["text_sha256"] if "text_sha256" in rows else rows["document"]
    indexed = rows.set_index([texts, texts.groupby(texts).cumcount()])
    return indexed.reindex(columns=_COLUMNS).astype(float).assign(document=indexed["document"])


_COLUMNS = [*UNITS, *dict.fromkeys(UNITS.values())]
