"""``longce score`` and ``longce evaluate`` of several models, which are compared with the first one."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.models.loading.config import ModelConfig, ServerConfig
from lightning_modules.models.loading.load import check_model
from lightning_modules.scoring.records import Record, write_records
from lightning_modules.scoring.score import check_records_file, score, table


def score_models(models: Sequence[str], *, output: str | None = None, **options: Any) -> Iterator[str]:
    """Score texts with one or more models, and yield their tables when they are known; ``options`` are of `score`.

    Each model is scored with ``context_extension`` and with each of ``other_extensions``. Several are compared by
    ratios over the documents. The records of all are written to the file ``output``, after each model.
    """
    variants = _list_variants(models, options)
    if output is not None:
        check_records_file(output)
    by_name: dict[str, list[Record]] = {}
    for variant in variants:
        found = score(model=variant.model, context_extension=variant.extension, **options)
        # A context extension is a part of the model's identity, and here of its name.
        by_name[variant.name] = [
            record._replace(model=record.model._replace(name=f"{record.model.name}{variant.suffix}"))
            for record in found
        ]
        if output is not None:
            write_records(output, list(chain.from_iterable(by_name.values())))
        heading = f"{variant.name}\n" if variant.name else ""
        yield f"{heading}{table(by_name[variant.name])}" + ("\n" if variant.name else "")
    if len(variants) > 1:
        # Comparing needs the extra `reports`, and a single model does not.
        from longce.compare.command import compare_runs
        from longce.compare.runs import make_scored_run

        yield compare_runs([make_scored_run(name, records) for name, records in by_name.items()])


def evaluate_models(models: Sequence[str], *, output: str, **options: Any) -> str:
    """Evaluate one or more models on tasks, and return a table; ``options`` are those of `evaluate`.

    Each model is evaluated with ``context_extension`` and with each of ``other_extensions``. Each of several has a
    folder in ``output`` with its name.
    """
    from longce.compare.command import compare
    from longce.evaluate import evaluate

    variants = _list_variants(models, options)
    if len(variants) == 1:
        return evaluate(models[0], output, context_extension=variants[0].extension, **options)
    folders = [Path(output).expanduser() / variant.name for variant in variants]
    for variant, folder in zip(variants, folders, strict=True):
        evaluate(variant.model, str(folder), context_extension=variant.extension, **options)
    reports = "".join(f"Report: {path}\n" for folder in folders if (path := folder / "report.html").is_file())
    return f"{compare(folders)}\n{reports}".rstrip()


class _Variant(NamedTuple):
    """A model with a context extension, and its name in results, which is empty for a single one."""

    name: str
    model: str
    extension: dict[str, Any] | None
    suffix: str = ""  # of the name, for the extension


def _list_variants(models: Sequence[str], options: dict[str, Any]) -> list[_Variant]:
    """Return each model with each context extension, which are removed from the options.

    Several have different names, and their configs and weights are found before the first is loaded.
    """
    extensions = [options.pop("context_extension", None), *options.pop("other_extensions", ())]
    if len(models) == len(extensions) == 1:
        return [_Variant("", models[0], extensions[0])]
    variants: dict[str, _Variant] = {}
    suffixes = _name_extensions(extensions)
    for name, model in zip(_name_models(models, **options), models, strict=True):
        for suffix, extension in zip(suffixes, extensions, strict=True):
            variant = _Variant(f"{name}{suffix}", model, extension, suffix)
            if variant.name in variants:
                raise ValueError(
                    f"`context_extension` gives two models the name '{variant.name}': give each extension once."
                )
            variants[variant.name] = variant
    return list(variants.values())


def _name_extensions(extensions: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return a suffix of the model's name for each extension: ``-yarn-16384``, with the options that differ."""
    parsed = [None if settings is None else asdict(ContextExtension.parse(settings)) for settings in extensions]
    names = []
    for extension in parsed:
        if extension is None:
            names.append("")
            continue
        alike = [other for other in parsed if other is not None and other["method"] == extension["method"]]
        options = []
        for name, value in extension.items():
            differs = any(other[name] != value for other in alike)
            if differs and isinstance(value, int | float) and name != "target_length":
                options.append(f"{name}{value}")
        names.append("-".join(["", extension["method"], str(extension["target_length"]), *options]))
    return names


def _name_models(
    models: Sequence[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    server: ServerConfig | None = None,
    **_: Any,
) -> list[str]:
    """Return unique names for models, after finding the configs and weights of all of them."""
    names = [os.path.basename(os.path.abspath(model)) for model in models]  # also of `.` and `models/a/`
    if len(set(names)) < len(names):
        names = [re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model) for model in models]
    if len(set(names)) < len(names):
        raise ValueError(f"`model` names a model twice: {', '.join(models)}. Give each one once.")
    for model in models:
        check_model(ModelConfig(model, revision=revision, trust_remote_code=trust_remote_code, server=server))
    return names
