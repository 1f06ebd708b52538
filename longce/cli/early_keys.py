"""Early check of the names and numbers of an experiment, without the libraries that define them.

Importing Lightning and torch takes ten times as long, so the names come from the source of the classes. The parser
handles everything that this check does not understand, and names that do not resemble a known name.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from lightning_modules.models.loading.config import ModelConfig
from longce.cli.config_files import list_options, names_model_class, read_configs
from longce.cli.errors import find_in_configs, find_nearest, stop_with_usage

_TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_MODEL = "lightning_modules.long_context_lm.LongContextLM"
_OBJECTIVES = "lightning_modules.objectives"
# Other modules may have classes that their source does not show: aliases, functions, lazy and star imports.
_MODULES_OF_CHOICES = ("callbacks", "datamodules", _OBJECTIVES)
_SECTIONS = ("model", "data", "trainer", "seed_everything", "ckpt_path", "config", "print_config")
_NUMBERS = {"int": "int", "PositiveInt": "int", "NonNegativeInt": "int", "float": "float"}


class _Source(NamedTuple):
    """A class as it is written."""

    module: str
    tree: ast.Module  # of the module
    node: ast.ClassDef


def check_keys(arguments: Sequence[str]) -> None:
    """Stop if a config or an option misspells a section, a key or a class, or if a number is a word."""
    known = {"trainer": _list_arguments(_TRAINER) or {}}
    if not names_model_class(arguments):
        settings = {field.name: str(field.type) for field in fields(ModelConfig)}
        known["model"] = {**(_list_arguments(_MODEL) or {}), **settings}
    for config in read_configs(arguments).values():
        _check_sections(arguments, config)
        _check_classes(arguments, config, "")
    for section, key, value in _list_settings(arguments):
        types = known.get(section)
        if types is None:
            continue
        near = _find_misspelled(key, [*types, "help"])
        if near is not None:
            place = find_in_configs(arguments, f"{section}.{key}")
            dashes = "" if place else "--"
            hint = f"Did you mean `{dashes}{section}.{near}`?"
            stop_with_usage(f"{place}unknown option `{dashes}{section}.{key}`. {hint}")
        _check_number(arguments, f"{section}.{key}", types.get(key, ""), value)


def _check_sections(arguments: Sequence[str], config: dict[str, Any]) -> None:
    for section in config:
        near = _find_misspelled(str(section).partition(".")[0], _SECTIONS)
        if near is not None:
            _stop_at(arguments, section, f"unknown option `{section}`. Did you mean `{near}`?")


def _list_settings(arguments: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield section, name and value of each key in the configs and the options."""
    for config in read_configs(arguments).values():
        for section, values in config.items():
            if not isinstance(values, dict):
                continue
            for key, value in values.items():
                yield str(section), str(key).removesuffix("+"), value
    for option, value in list_options(arguments):
        if option.startswith("--") and option.count(".") == 1:
            section, key = option.removeprefix("--").split(".")
            yield section, key.removesuffix("+"), value
        elif option.startswith("--") and "." in option:
            section, key = option.removeprefix("--").split(".")[:2]
            yield section, key.removesuffix("+"), None


def _check_classes(arguments: Sequence[str], value: Any, path: str) -> None:
    """Check each class that a part of a config names, and its settings."""
    if isinstance(value, list):
        for part in value:
            _check_classes(arguments, part, path)
    if not isinstance(value, dict):
        return
    class_path = value.get("class_path")
    settings = value.get("init_args")
    if isinstance(class_path, str):
        if path == "model.objective" and "." not in class_path:
            class_path = f"{_OBJECTIVES}.{class_path}"
        if not isinstance(settings, dict):
            settings = {}
        _check_class(arguments, class_path, settings, path)
    for key, part in value.items():
        _check_classes(arguments, part, f"{path}.{key}".removeprefix("."))


def _check_class(arguments: Sequence[str], class_path: str, settings: dict[str, Any], path: str) -> None:
    owner, _, name = class_path.rpartition(".")
    if owner in _MODULES_OF_CHOICES and _find_class(class_path) is None:
        near = _find_misspelled(name, _list_names(owner))
        if near is not None:
            _stop_at(arguments, class_path, f"`{owner}` has no `{name}`. Did you mean `{near}`?")
    types = _list_arguments(class_path)
    if types is None:
        return
    for key, value in settings.items():
        if not isinstance(key, str):  # such as `on`, which is true in YAML
            continue
        near = _find_misspelled(key.removesuffix("+"), types)
        if near is not None:
            _stop_at(arguments, key, f"`{class_path}` has no `{key}`. Did you mean `{near}`?")
        _check_number(arguments, f"{path}.init_args.{key}", types.get(key, ""), value)


def _find_misspelled(name: str, known: Sequence[str] | dict[str, str]) -> str | None:
    """Return the known name that a name misspells; None if it is known, or does not resemble a known name."""
    if name in known:
        return None
    return find_nearest(name, known)


def _check_number(arguments: Sequence[str], name: str, annotation: str, value: Any) -> None:
    kind = _NUMBERS.get(annotation.removesuffix(" | None"))
    if kind is None or not isinstance(value, str) or value.startswith("-"):  # as the next option
        return
    with suppress(ValueError):
        float(value)
        return
    try:
        is_word = isinstance(yaml.safe_load(value), str)
    except yaml.YAMLError:
        is_word = True
    if is_word:
        stop_with_usage(f"{find_in_configs(arguments, name)}`{name}`: Expected {kind}. Got value: {value}")


def _stop_at(arguments: Sequence[str], name: str, message: str) -> NoReturn:
    stop_with_usage(find_in_configs(arguments, name) + message)


def _list_arguments(class_path: str) -> dict[str, str] | None:
    """Return the annotations of a class's arguments, by name; None if its source does not contain them."""
    source = _find_class(class_path)
    if source is None:
        return None
    types: dict[str, str] = {}
    passes_on = True  # all arguments to its base class
    functions = [part for part in ast.walk(source.node) if isinstance(part, ast.FunctionDef)]
    inits = [function for function in functions if function.name in ("__init__", "__new__")]
    if len(inits) > 1:  # overloads, or one of several versions
        return None
    for part in inits:
        for each in [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]:
            types[each.arg] = ast.unparse(each.annotation) if each.annotation else ""
        # The model's own further arguments are those of `ModelConfig`.
        if part.args.kwarg is None or class_path == _MODEL:
            return types
        others = part.args.kwarg.arg
        body = ast.unparse(part)
        is_passed = re.search(rf"super\(\).__init__\(.*\*\*{others}\)", body) is not None
        # Otherwise there are arguments without a declaration.
        passes_on = is_passed and f"{others}.pop(" not in body
    # Without the base class the names would not be complete.
    if not passes_on or len(source.node.bases) != 1 or source.node.decorator_list:
        return None
    base = ast.unparse(source.node.bases[0])
    base_path = _find_import(source.tree, base) or f"{source.module}.{base}"
    inherited = None if base_path == class_path else _list_arguments(base_path)
    return None if inherited is None else {**inherited, **types}


def _find_class(class_path: str) -> _Source | None:
    """Return the source of a class, which its module may import."""
    module, _, name = class_path.rpartition(".")
    tree = _parse_module(module)
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Source(module, tree, node)
    imported = _find_import(tree, name)
    if imported is None:
        return None
    return _find_class(imported)


def _find_import(tree: ast.Module, name: str) -> str | None:
    """Return the import path of a name in a module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        for each in node.names:
            if (each.asname or each.name) == name:
                return f"{node.module}.{each.name}"
    return None


def _list_names(module: str) -> list[str]:
    """Return the names of the classes that a module defines or imports."""
    tree = _parse_module(module)
    if tree is None:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            names += [each.name for each in node.names if each.name[0].isupper()]
    return names


def _parse_module(module: str) -> ast.Module | None:
    """Parse the source of a module without importing it or its packages."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top not in ("", "__main__") else None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    file = folder.joinpath(*rest, "__init__.py")
    if not file.is_file():
        file = folder.joinpath(*rest[:-1], f"{module.rpartition('.')[2]}.py")
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # the parser reports what cannot be imported
        return None
