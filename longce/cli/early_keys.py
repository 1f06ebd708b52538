"""Early check of the keys of an experiment, which takes seconds less than to import the libraries that define them."""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from lightning_modules.models.loading.config import ModelConfig
from longce.cli.config_files import list_options, names_model_class, read_configs
from longce.cli.errors import find_in_configs, find_nearest, stop_with_usage

_MODEL_FILE = Path(__file__).parents[2] / "lightning_modules" / "long_context_lm.py"


def check_keys(arguments: Sequence[str]) -> None:
    """Stop if a key of ``trainer`` or ``model`` is misspelled in a config or an option."""
    known = {"trainer": [*_list_arguments(_find_trainer_file(), "Trainer"), "help"]}
    if not names_model_class(arguments):
        settings = [field.name for field in fields(ModelConfig)]
        known["model"] = [*_list_arguments(_MODEL_FILE, "LongContextLM"), *settings, "help"]
    for section, key in _list_keys(arguments):
        names = known.get(section, [])
        near = find_nearest(key, names)
        if near and key not in names:  # the parser reports a key that is like no other
            place = find_in_configs(arguments, f"{section}.{key}")
            dashes = "" if place else "--"
            hint = f"Did you mean `{dashes}{section}.{near}`?"
            stop_with_usage(f"{place}unknown option `{dashes}{section}.{key}`. {hint}")


def _find_trainer_file() -> Path:
    lightning = importlib.util.find_spec("lightning")  # importing it takes seconds
    assert lightning is not None
    assert lightning.origin is not None
    return Path(lightning.origin).parent / "pytorch" / "trainer" / "trainer.py"


def _list_keys(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield section and name of each key in the configs and the options."""
    for config in read_configs(arguments).values():
        for section, values in config.items():
            if not isinstance(values, dict):
                continue
            for key in values:
                yield str(section), str(key).removesuffix("+")
    for option, _ in list_options(arguments):
        if option.startswith("--") and "." in option:
            section, key = option.removeprefix("--").split(".")[:2]
            yield section, key.removesuffix("+")


def _list_arguments(file: Path, class_name: str) -> list[str]:
    """Return the names of a class's arguments, from its source."""
    for kind in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(kind, ast.ClassDef) or kind.name != class_name:
            continue
        for part in kind.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return [each.arg for each in [*part.args.args, *part.args.kwonlyargs]]
    return []
