"""Early check of the keys of an experiment, which takes seconds less than to import the libraries that define them."""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from lightning_modules.commands.cli.config_files import list_options, names_model_class, read_config
from lightning_modules.commands.cli.errors import find_in_configs, stop_with_usage
from lightning_modules.models.loading.config import ModelConfig

_SIMILAR = 0.75
"""Similarity of an unknown key to a known one from which it is a misspelling; the parser judges the others."""


def check_keys(arguments: Sequence[str]) -> None:
    """Stop if a key of ``trainer`` or ``model`` is misspelled in a config or an option."""
    known = {"trainer": _list_trainer_keys()}
    if not names_model_class(arguments):
        known["model"] = _list_model_keys()
    for place, section, key in _list_keys(arguments):
        if key in known.get(section, (key,)):
            continue
        if near := difflib.get_close_matches(key, known[section], n=1, cutoff=_SIMILAR):
            dashes = "" if place else "--"
            where = find_in_configs(arguments, f"{section}.{key}") if place else ""
            hint = f"Did you mean `{dashes}{section}.{near[0]}`?"
            stop_with_usage(f"{where}unknown option `{dashes}{section}.{key}`. {hint}")


def _list_keys(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the config (empty for an option), the section and the name of each key."""
    for option, value in list_options(arguments):
        if option in ("-c", "--config") and Path(value).is_file():
            config = read_config(value)
            sections = config.items() if isinstance(config, dict) else ()
            for section, values in sections:
                for key in values if isinstance(values, dict) else ():
                    yield value, str(section), str(key).removesuffix("+")
        elif option.startswith("--") and "." in option:
            section, key = option.removeprefix("--").split(".")[:2]
            yield "", section, key.removesuffix("+")


def _list_model_keys() -> list[str]:
    own = _list_arguments(Path(__file__).parents[2] / "long_context_lm.py", "LongContextLM")
    return [*own, *(field.name for field in fields(ModelConfig)), "help"]


def _list_trainer_keys() -> list[str]:
    found = importlib.util.find_spec("lightning")  # without importing it
    if found is None or found.origin is None:
        return []
    file = Path(found.origin).parent / "pytorch" / "trainer" / "trainer.py"
    return [*_list_arguments(file, "Trainer"), "help"]


def _list_arguments(file: Path, class_name: str) -> list[str]:
    """Return the names of a class's arguments, from its source; none if it is not there."""
    if not file.is_file():
        return []
    for kind in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(kind, ast.ClassDef) and kind.name == class_name:
            inits = [part for part in kind.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
            arguments = inits[0].args
            return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return []
