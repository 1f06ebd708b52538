"""``longce reproduce TABLE``: measure a table of the paper again, and print our numbers beside it."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from benchmarks.reproduction.tables.evaluating import longeval_cells, measure_longeval, other_models
from benchmarks.reproduction.tables.measuring import Measuring, select_documents
from benchmarks.reproduction.tables.options import MeasureOptions, add_table_options
from benchmarks.reproduction.tables.ours import (
    correlations,
    measured_intervals,
    ours,
    scored_models,
    training_intervals,
)
from benchmarks.reproduction.tables.published import (
    Cells,
    NamedModel,
    Table,
    as_json,
    find_model,
    find_table,
    markdown,
    published,
)
from benchmarks.reproduction.tables.results import ITSELF, Result, read_results
from benchmarks.reproduction.tables.scores import ScoreIntervals, Scores, read_score_intervals, read_scores
from benchmarks.reproduction.tables.training import CONFIGS, carry_out, script, table_runs
from lightning_modules.utilities.files import writable_folder, write_atomically
from longce.cli.errors import ConciseParser


def reproduce_table(
    table: str,
    data: Any,
    *,
    output: str = "runs/reproduce",
    models: list[str] | None = None,
    evaluators: list[str] | None = None,
    merge: list[str] | None = None,
    scores: list[str] | None = None,
    run: bool = False,
    fit_options: str = "",
    options: MeasureOptions,
) -> list[str]:
    """Measure what a table of the paper reports, print ours beside it, and return one line per failure.

    The test documents of the data module ``data`` are measured, and its tokenizer counts the tokens. The other
    arguments are the options of ``longce reproduce TABLE``.

    Raises:
        ValueError: If the table, a model, a score or a number cannot be used, or results have different settings.
    """
    chosen = find_table(table)
    known = read_scores(scores or [])
    folders = [Path(output).expanduser(), *map(_existing, merge or [])]
    writable_folder(folders[0], remedy="Choose another one with `--output`.")
    if chosen.kind == "training":
        failed = _train(chosen, folders[0], shlex.split(fit_options), run=run, quiet=scores is not None)
        if not run and scores is None:
            return []
        intervals = read_score_intervals(scores or [])
        return [*failed, *_report(chosen, {}, known, folders, of_scores=intervals)]
    if run or fit_options:
        raise ValueError(f"{table} has no models to train: leave out `run` and `fit_options`.")
    wanted, evaluator_models = _wanted(chosen, models, evaluators)
    if chosen.kind == "longeval":
        # Scores from elsewhere are enough unless models are named.
        measures = merge is None and (models is not None or scores is None)
        failed = measure_longeval(chosen, wanted, folders[0], options) if measures else []
        wanted += other_models(wanted, folders) if merge is not None and models is None else []
        return _report(chosen, {}, known, folders, failed=failed, models=wanted)
    if merge is None:
        _measure(data, folders[0], options, wanted, evaluator_models)
    results = read_results(folders)
    if models is not None or merge is None:
        results = _select_models(results, wanted)
    concerned = list(evaluator_models) or [ITSELF]
    if merge is not None and evaluators is None and chosen.kind == "perplexity" and evaluator_models:
        concerned += sorted({evaluator for _, evaluator in results} - {ITSELF, *evaluator_models})
    return _report(chosen, results, known, folders, concerned)


def _train(table: Table, folder: Path, fit_options: list[str], *, run: bool, quiet: bool) -> list[str]:
    """Train the models of a table, and return the failures; or print the commands that train them, unless quiet."""
    runs = table_runs(table, folder.absolute(), fit_options)
    if run:
        return carry_out(runs, table)
    if not quiet:
        sys.stdout.write(script(runs, table))
    return []


def _select_models(
    results: dict[tuple[str, str], Result], wanted: Sequence[NamedModel]
) -> dict[tuple[str, str], Result]:
    names = {model.name for model in wanted}
    return {key: result for key, result in results.items() if key[0] in names}


def _existing(name: str) -> Path:
    folder = Path(name).expanduser()
    if not any((folder / name).is_dir() for name in ("results", "longeval")):
        raise ValueError(f"No results in '{name}': `merge` takes the folders that were `output` elsewhere.")
    return folder


def _wanted(
    table: Table, models: Sequence[str] | None, evaluators: Sequence[str] | None
) -> tuple[list[NamedModel], dict[str, NamedModel]]:
    """Return models and evaluators; without evaluators each model is its own."""
    rows = find_table("table5").rows if table.kind == "correlation" else table.rows
    rows = {row.partition(": ")[0]: () for row in rows} if table.kind == "longeval" else rows
    wanted = [find_model(word) for word in (rows if models is None else models)]
    defaults = table.evaluators or tuple(column for column in table.columns if column in published()["models"])
    if not defaults and evaluators:
        raise ValueError(f"{table.name} has no evaluators other than the models themselves: remove `evaluators`.")
    evaluator_models = [find_model(word) for word in evaluators or defaults]
    for kind, named in (("models", wanted), ("evaluators", evaluator_models)):
        if len({model.name for model in named}) < len(named):
            raise ValueError(f"`{kind}` must be different names, got {[model.name for model in named]}.")
    return wanted, {model.name: model for model in evaluator_models}


def _measure(
    data: Any,
    folder: Path,
    options: MeasureOptions,
    models: Sequence[NamedModel],
    evaluator_models: dict[str, NamedModel],
) -> None:
    """Run all measurements that are missing or have failed.

    Raises:
        ValueError: If `data` does not provide documents, or a stored result belongs to another model of the same name
            or to other settings.
    """
    if not callable(getattr(data, "source", None)):
        raise ValueError(f"`--data` does not provide documents to measure on: {type(data).__name__}.")
    texts = select_documents(
        data.source("test"),
        data.tokenizer,
        count=options.documents,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
    )
    measuring = Measuring(texts, folder, options)
    there = read_results([folder], measuring.settings)
    pending = []
    for model in models:
        missing = []
        for name in evaluator_models or (ITSELF,):
            result = there.get((model.name, name))
            if result is None or result.failure is not None:
                missing.append(name)
                continue
            for role, path in (("model", model.path), ("evaluator", evaluator_models.get(name, model).path)):
                if (before := result.made_by[f"{role}_path"]) != path:
                    raise ValueError(
                        f"In '{folder}' the {role} of '{model.name}' by '{name}' is '{before}', and now '{path}'. Give"
                        " it another name (NAME=PATH), or another `output`."
                    )
        if missing:
            pending.append((model, missing))
    measuring.measure(pending, evaluator_models)


def _report(
    table: Table,
    results: dict[tuple[str, str], Result],
    scores: Scores,
    folders: Sequence[Path],
    evaluators: Sequence[str] = (),
    *,
    failed: Sequence[str] = (),
    models: Sequence[NamedModel] = (),
    of_scores: ScoreIntervals | None = None,
) -> list[str]:
    """Print and write the table; return the failures.

    ``failed`` and ``models`` are those of Table 9; ``of_scores`` are the intervals of scores from files.
    """
    measured: Cells = {}
    intervals = measured_intervals(table, results, folders)
    if table.kind == "longeval":
        measured, intervals = longeval_cells(table, models, folders)
    if table.kind == "correlation":
        if evaluators[0] not in table.evaluators:  # numbers of different evaluators are not comparable
            blank = {row: (math.nan,) * len(table.columns) for row in table.rows}
            remark = f"The paper's numbers are by {table.evaluators[0]}, and left out here. {table.remark}"
            table = replace(table, rows=blank, remark=remark)
        table = replace(table, evaluators=tuple(evaluators))
        good = {key: result for key, result in results.items() if result.failure is None}
        intervals = {place: found.interval for place, found in correlations(table, good, scores).items()}
    cells = ours(table, results, scores, folders) | measured
    if table.kind == "training":
        intervals = training_intervals(table, cells, of_scores or {})
    text, content = markdown(table, cells, intervals), as_json(table, cells, intervals)
    if table.kind == "correlation":
        over = scored_models(table, results, scores)
        text += (
            f"\nOurs are by {evaluators[0]}, over {len(over)} models: {', '.join(over) or 'give their `--scores`'}.\n"
        )
        content |= {"evaluator": evaluators[0], "models": over}
    failures = [*failed] + [
        f"{model} by {evaluator}: {result.failure}"
        for (model, evaluator), result in results.items()
        if result.failure is not None and evaluator in evaluators
    ]
    text += "".join(f"\nNot measured: {line}\n" for line in failures)
    content |= {"failed": failures}
    write_atomically(folders[0] / f"{table.name}.md", text.encode())
    write_atomically(folders[0] / f"{table.name}.json", (json.dumps(content, indent=1) + "\n").encode())
    sys.stdout.write(text)
    return failures


def list_tables() -> str:
    """Return names and titles of all tables, one per line."""
    return "".join(f"{name:<15} {entry['title']}\n" for name, entry in published()["tables"].items())


def _join_options(words: Sequence[str]) -> list[str]:
    """Write ``--fit_options VALUE`` as one word: argparse takes a value that starts with ``-`` for an option."""
    joined = []
    rest = iter(words)
    for word in rest:
        if word == "--fit_options" and (value := next(rest, None)) is not None:
            word = f"{word}={value}"
        joined.append(word)
    return joined


def reproduce_table_command(arguments: Sequence[str]) -> None:
    """Run ``longce reproduce TABLE``; exits with 1 if a model could not be measured or trained.

    Args:
        arguments: ``reproduce`` and the words after it.
    """
    if "--list" in arguments:
        sys.stdout.write(list_tables())
        return
    parser = ConciseParser(default_config_files=[str(CONFIGS / "reproduce" / "tables.yaml")])
    parser.add_argument("-c", "--config", action="config", help="YAML file with options of this command.")
    add_table_options(parser)
    parser.add_subclass_arguments(LightningDataModule, "data", help="Its test documents are measured on.")
    options = parser.parse_args(_join_options(arguments[1:]))
    values = options.as_dict() | {"data": parser.instantiate(options).data}
    for name in ("config", "__default_config__"):
        values.pop(name, None)
    names = {item.name for item in fields(MeasureOptions)} & set(values)
    measured = MeasureOptions(**{name: values.pop(name) for name in names})
    if reproduce_table(**values, options=measured):
        sys.exit(1)
