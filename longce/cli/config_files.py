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

CONFIGS = Path(__file__).parents[1] / "configs"
"""Folder of the configs; in a checkout a link to the one at its top."""

_CONFIG_OPTIONS = ("-c", "--config")


def use_checked_yaml() -> None:
    """Make jsonargparse refuse duplicate keys, and read ``-inf`` as a number and ``10:00:00`` (YAML 1.1) as text."""
    loader = get_yaml_default_loader()
    infinity = re.compile(r"[-+](inf|infinity)$", re.IGNORECASE)
    loader.add_implicit_resolver("tag:yaml.org,2002:float", infinity, ["-", "+"])
    loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
    for kind in ("int", "float"):
        read = getattr(loader, f"construct_yaml_{kind}")
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", partial(_construct_number, read))


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
    if ":" in node.value:
        return node.value
    return read(loader, node)


def find_packaged_configs(arguments: Sequence[str]) -> list[str]:
    """Replace names such as ``configs/base.yaml`` that do not exist here by those of the installed package."""
    words: list[str] = []
    previous = ""
    for word in arguments:
        option, equals, value = word.partition("=")
        if equals and option in _CONFIG_OPTIONS:
            words.append(f"{option}={_find_packaged(value)}")
        elif previous in _CONFIG_OPTIONS:
            words.append(_find_packaged(word))
        else:
            words.append(word)
        previous = word
    return words


def _find_packaged(name: str) -> str:
    packaged = CONFIGS.parent / name
    if name.startswith("configs/") and not os.path.exists(name) and packaged.is_file():
        return str(packaged)
    return name


def list_options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word as an option, with the value after ``=`` or else the next word."""
    for word, following in pairwise([*arguments, ""]):
        option, equals, value = word.partition("=")
        if not equals:
            value = following
        yield option, value


def read_configs(arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the configs of a command line by file, in their order; files that do not exist are left to the parser.

    Raises:
        ValueError: If a file is not a mapping in YAML without duplicate keys.
    """
    configs: dict[str, dict[str, Any]] = {}
    for option, file in list_options(arguments):
        if option in _CONFIG_OPTIONS and os.path.isfile(file):
            configs.pop(file, None)  # the last of several places counts
            configs[file] = read_config(file)
    return configs


def read_config(file: str) -> dict[str, Any]:
    """Read a config with the checks of `use_checked_yaml`."""
    try:
        config = yaml.load(Path(file).read_text(encoding="utf-8-sig"), Loader=get_yaml_default_loader())
    except UnicodeDecodeError as error:
        raise ValueError(f"The config '{file}' cannot be used: {error}. Save it as UTF-8 text.") from error
    except yaml.MarkedYAMLError as error:
        place = file
        if error.problem_mark is not None:
            place += f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{place}: this is not YAML: {error.problem} {error.context or ''}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"The config '{file}' cannot be used: {error}") from error
    if not isinstance(config, dict | None):
        raise ValueError(f"The config '{file}' must be a mapping of options to values, got a {type(config).__name__}.")
    return config or {}


def names_model_class(arguments: Sequence[str]) -> bool:
    """Return whether a command line or one of its configs names the class of the model, instead of only settings."""
    for option, value in list_options(arguments):
        is_settings = value.startswith("{") or os.path.isfile(value)
        if option in ("--model", "--model.class_path", "--model.help") and not is_settings:
            return True
    found = False
    for file, config in read_configs(arguments).items():
        model = config.get("model")
        if isinstance(model, dict) and "class_path" in model:
            found = True
            misplaced = sorted({*model} - {"class_path", "init_args", "dict_kwargs"})
            if misplaced:
                raise ValueError(f"'{file}': `model` names a class, so move {misplaced} to its `init_args`.")
        found = found or isinstance(model, str)
    return found
