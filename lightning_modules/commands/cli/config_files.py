"""Config files of a command line: stricter YAML, packaged configs, and the class of the model."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader

CONFIGS = Path(__file__).parents[3] / "configs"
"""Folder of the configs, in a checkout or beside the installed packages."""

_INFINITY = re.compile(r"[-+](inf|infinity)$", re.IGNORECASE)
_NEGATIVE = re.compile(rf"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|-\.inf|{_INFINITY.pattern}", re.IGNORECASE)


def use_checked_yaml() -> None:
    """Make jsonargparse refuse duplicate keys, and read ``-inf`` as a number and ``10:00:00`` (YAML 1.1) as text."""
    loader = get_yaml_default_loader()
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _INFINITY, ["-", "+"])
    loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
    for kind in ("int", "float"):
        read = getattr(loader, f"construct_yaml_{kind}")
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", partial(_construct_number, read))


def join_values(arguments: Sequence[str]) -> list[str]:
    """Write ``--option value`` as ``--option=value`` where argparse would take the value for an option.

    These are negative numbers such as ``-inf`` and ``-1e3``, values with a space, and all values of ``--fit_options``.
    """
    words: list[str] = []
    for word in arguments:
        previous = words[-1] if words else ""
        is_option = re.fullmatch(r"--[^=\s]+", previous) is not None
        is_value = previous == "--fit_options" or " " in word or _NEGATIVE.fullmatch(word)
        if is_option and word.startswith("-") and is_value:
            words[-1] = f"{previous}={word}"
        else:
            words.append(word)
    return words


def find_packaged_configs(arguments: Sequence[str]) -> list[str]:
    """Replace names such as ``configs/base.yaml`` that do not exist here by those of the installed package."""
    words = list(arguments)
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = value if equals and option in ("-c", "--config") else word
        is_config = equals or (index > 0 and words[index - 1] in ("-c", "--config"))
        packaged = CONFIGS.parent / name
        if is_config and name.startswith("configs/") and not os.path.exists(name) and packaged.is_file():
            words[index] = f"{option}={packaged}" if equals else str(packaged)
    return words


def check_config_files(arguments: Sequence[str]) -> None:
    """Check the syntax of the configs of a command line, and name the file in the error."""
    for option, value in list_options(arguments):
        if option not in ("-c", "--config") or not os.path.isfile(value):
            continue
        try:
            read_config(value)
        except (ValueError, yaml.YAMLError) as error:
            advice = " Save it as UTF-8 text." if isinstance(error, UnicodeDecodeError) else ""
            raise ValueError(f"The config '{value}' cannot be used: {error}{advice}") from error


def read_config(file: str) -> Any:
    """Read a config with the checks of `use_checked_yaml`."""
    return yaml.load(Path(file).read_text(encoding="utf-8-sig"), Loader=get_yaml_default_loader())


def list_options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word as an option, with the value after ``=`` or else the next word."""
    for word, following in pairwise([*arguments, ""]):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def names_model_class(arguments: Sequence[str]) -> bool:
    """Return whether a command line or one of its configs names the class of the model, instead of only settings."""
    for option, value in list_options(arguments):
        if option in ("--model", "--model.class_path", "--model.help"):
            if not (value.startswith("{") or os.path.isfile(value)):
                return True
        elif option in ("-c", "--config") and os.path.isfile(value) and _config_names_class(value):
            return True
    return False


def _config_names_class(file: str) -> bool:
    config = read_config(file)
    # The settings of one command, or of each command by its name.
    parts = [config, *config.values()] if isinstance(config, dict) else []
    for part in parts:
        model = part.get("model") if isinstance(part, dict) else None
        if isinstance(model, str):
            return True
        if isinstance(model, dict) and "class_path" in model:
            misplaced = sorted({*model} - {"class_path", "init_args", "dict_kwargs"})
            if misplaced:
                raise ValueError(f"'{file}': `model` names a class, so move {misplaced} to its `init_args`.")
            return True
    return False


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> Any:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise yaml.YAMLError(
                f"'{key.value}' is given twice, in lines {lines[key.value]} and {line}. Remove one of them."
            )
        lines[key.value] = line
    return loader.construct_yaml_map(node)


def _construct_number(read: Callable[[Any, Any], Any], loader: Any, node: yaml.ScalarNode) -> Any:
    return node.value if ":" in node.value else read(loader, node)
