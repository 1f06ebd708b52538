"""``longce score`` and ``longce evaluate`` of several models, which are compared with the first one."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_modules.commands.compare.command import compare, compare_runs
from lightning_modules.commands.compare.runs import make_scored_run
from lightning_modules.commands.evaluate import evaluate
from lightning_modules.models.config import ModelConfig, ServerConfig
from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.models.loading import check_model
from lightning_modules.scoring.score import score, table
from lightning_modules.tasks.evaluation.lm_eval_results import sanitize_name
from lightning_modules.utilities.files import writable_folder


def score_models(models: Sequence[str], *, output: str | None = None, **options: Any) -> Iterator[str]:
    """Score texts with one or more models, and yield their tables when they are known; ``options`` are of `score`.

    Each model is scored with ``context_extension`` and with each of ``other_extensions``.

    The results of several models are written to files in the folder ``output``, and their perplexities are compared by
    ratios over the documents.
    """
    extensions = [options.pop("context_extension", None), *options.pop("other_extensions", ())]
    if len(models) == len(extensions) == 1:
        yield table(score(model=models[0], output=output, context_extension=extensions[0], **options))
        return
    variants = [
        (f"{name}{_name_extension(extension)}", model, extension)
        for name, model in zip(_name_models(models, **options), models, strict=True)
        for extension in extensions
    ]
    names = [name for name, *_ in variants]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"`context_extension` gives two models the name '{repeated}': give each method and length once."
        )
    if output is not None:
        writable_folder(Path(output).expanduser(), remedy="Choose another folder with `--output`.")
    files = [None if output is None else str(Path(output).expanduser() / f"{name}.json") for name in names]
    results = []
    for (name, model, extension), file in zip(variants, files, strict=True):
        results.append(score(model=model, output=file, context_extension=extension, **options))
        yield f"{name}\n{table(results[-1])}\n"
    yield compare_runs([*map(make_scored_run, names, results)])


def evaluate_models(models: Sequence[str], *, output: str, **options: Any) -> str:
    """Evaluate one or more models on tasks, and return a table; ``options`` are those of `evaluate`.

    Each of several models has a folder in ``output`` with its name.
    """
    if len(models) == 1:
        return evaluate(models[0], output, **options)
    folders = [Path(output).expanduser() / name for name in _name_models(models, **options)]
    for model, folder in zip(models, folders, strict=True):
        evaluate(model, str(folder), **options)
    reports = "".join(f"Report: {path}\n" for folder in folders if (path := folder / "report.html").is_file())
    return f"{compare(folders)}\n{reports}".rstrip()


def _name_extension(settings: Mapping[str, Any] | None) -> str:
    """Return what is added to a model's name, such as ``-yarn-16384``."""
    if settings is None:
        return ""
    if not isinstance(settings, Mapping):
        raise ValueError(f"`context_extension` must be a mapping such as {{method: yarn, ..}}, got {settings!r}.")
    extension = ContextExtension.parse(settings)
    return f"-{extension.method}-{extension.target_length}"


def _name_models(
    models: Sequence[str], *, trust_remote_code: bool = False, server: ServerConfig | None = None, **_: Any
) -> list[str]:
    """Return different names for models, whose configs and weights are found before the first is loaded."""
    names = [os.path.basename(os.path.abspath(model)) for model in models]  # also of `.` and `models/a/`
    if len(set(names)) < len(names):
        names = [sanitize_name(model) for model in models]
    if len(set(names)) < len(names):
        raise ValueError(f"`model` names a model twice: {', '.join(models)}. Give each one once.")
    for model in models:
        check_model(ModelConfig(model, trust_remote_code=trust_remote_code, server=server))
    return names
