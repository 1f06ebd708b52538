"""Stricter YAML for configs and options: duplicate keys, octal numbers and endless aliases are errors."""

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader

from lightning_modules.utilities.bounded_yaml import check_expansion

CONFIGS = Path(__file__).parents[3] / "configs"
"""Folder of the configs, in a checkout or beside the installed packages."""

_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
"""Keys of a class in a config."""

_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")


def use_checked_yaml() -> None:
    """Make jsonargparse refuse duplicate keys, octal numbers and endless aliases, and read ``2:30`` as text."""
    loader = get_yaml_default_loader()
    loader.get_single_node = _get_bounded_node
    loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
    for kind in ("int", "float"):
        loader.add_constructor(f"tag:yaml.org,2002:{kind}", _construct_number)


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
    """Check the configs, mappings and lists in a command line, and name the file or the option in the error."""
    for index, word in enumerate(arguments):
        option, _, value = word.partition("=")
        value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        if option in ("-c", "--config"):
            _check_file(value)
        elif option.startswith("--") and value.startswith(("{", "[")):
            _check_collection(option, value)


def names_model_class(arguments: Sequence[str]) -> bool:
    """Return whether a command line or one of its configs names the class of the model, instead of only settings."""
    for word, following in pairwise([*arguments, ""]):
        option, _, value = word.partition("=")
        value = value or following
        if option in ("--model", "--model.class_path", "--model.help"):
            if not (value.startswith("{") or os.path.isfile(value)):
                return True
        elif option in ("-c", "--config") and os.path.isfile(value):
            config = yaml.load(Path(value).read_text(encoding="utf-8-sig"), Loader=get_yaml_default_loader())
            parts = [config, *config.values()] if isinstance(config, dict) else []  # of one command, or of several
            for model in [part["model"] for part in parts if isinstance(part, dict) and "model" in part]:
                if isinstance(model, dict) and "class_path" in model and (misplaced := {*model} - _CLASS_KEYS):
                    raise ValueError(
                        f"'{value}': `model` names a class, so move {sorted(misplaced)} to its `init_args`."
                    )
                if isinstance(model, str) or (isinstance(model, dict) and "class_path" in model):
                    return True
    return False


def _get_bounded_node(loader: Any) -> yaml.Node | None:
    node: yaml.Node | None = super(type(loader), loader).get_single_node()
    check_expansion(node)
    return node


def _construct_mapping(loader: Any, node: yaml.MappingNode) -> Any:
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise yaml.YAMLError(
                f"'{key.value}' is given twice, in lines {lines[key.value]} and {line}. Remove one of them."
            )
        lines[key.value] = line
        if key.value == "init_args" and value.tag.endswith(":null"):
            raise yaml.YAMLError(f"line {line}: `init_args` is null. Add settings or remove it.")
    return loader.construct_yaml_map(node)


def _construct_number(loader: Any, node: yaml.ScalarNode) -> Any:
    if ":" in node.value:  # a base-60 number in YAML 1.1, text in YAML 1.2; numeric options then refuse it
        return node.value
    if _OCTAL.fullmatch(node.value):  # 010 is 8 in YAML 1.1, and 10 in YAML 1.2 and on the command line
        raise yaml.YAMLError(
            f"line {node.start_mark.line + 1}: '{node.value}' is an octal number. Remove its leading zero, or quote it"
            " if it is text."
        )
    return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)


def _check_file(name: str) -> None:
    if not os.path.isfile(name):
        if name.endswith((".yaml", ".yml")) and "\n" not in name:
            raise ValueError(f"The config '{name}' does not exist.")
        return  # a pipe, or YAML instead of a file
    try:
        yaml.load(Path(name).read_text(encoding="utf-8-sig"), Loader=get_yaml_default_loader())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The config '{name}' cannot be read: {error}. Save it as UTF-8 text.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The config '{name}' cannot be used: {error}") from error


def _check_collection(option: str, value: str) -> None:
    """Check a mapping or list given as an option: jsonargparse would only report that its type is wrong."""
    try:
        yaml.load(value, Loader=get_yaml_default_loader())
    except yaml.MarkedYAMLError:  # text that is not YAML
        return
    except yaml.YAMLError as error:
        raise ValueError(f"`{option}={value:.300}` cannot be used: {error}") from error
