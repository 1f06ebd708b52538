"""Check configs and option values before jsonargparse reads them: each key once, and within limits."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader

from lightning_modules.commands.cli.old_paths import find_moved_config, rename_old_paths

MAX_BYTES = 1 << 20
"""Bytes of a config file."""

MAX_VALUES = 100_000
"""Values of a config, when all aliases are written out: nine lines of aliases can be billions."""

MAX_DEPTH = 50
"""Levels of nesting of a config."""

_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def use_checked_yaml() -> None:
    """Let jsonargparse check YAML before it reads it, and read ``2:30`` as text. Further calls change nothing."""
    read = jsonargparse.get_loader("yaml")
    if not isinstance(read, _Checked):
        jsonargparse.set_loader("yaml", _Checked(read), (yaml.YAMLError,))
        _leave_out_base_60(get_yaml_default_loader())  # which reads the values of single options


def check_config_files(arguments: Sequence[str]) -> None:
    """Check the configs, mappings and lists in a command line, so that a message can name the file or the option.

    Args:
        arguments: Words of the command line, in which ``-c`` and ``--config`` precede files.

    Raises:
        ValueError: If a file is missing, too large, or not UTF-8, or if YAML has a key twice or a number to base 8.
    """
    for index, word in enumerate(arguments):
        option, _, value = word.partition("=")
        value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        if option in ("-c", "--config") and value.endswith((".yaml", ".yml")) and "\n" not in value:
            _check_exists(Path(value))
        if option in ("-c", "--config") and os.path.isfile(value):
            _check_file(Path(value))
        elif option.startswith("--") and value.startswith(("{", "[")):
            _check_collection(option, value)


def check_yaml(text: str) -> None:
    """Refuse YAML with a key given twice, of which one would be ignored, or too large or deep when written out.

    Raises:
        yaml.YAMLError: Naming the key and its lines, the limit, or a number that is not what it seems.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise yaml.YAMLError(f"more than {MAX_DEPTH} levels. Nest it less.") from None
    if root is not None:
        _count_values(root, (), {})


def _count_values(node: yaml.Node, outer: tuple[yaml.Node, ...], known: dict[yaml.Node, int]) -> int:
    """Check a node and return its number of values, with all aliases written out."""
    line = f"line {node.start_mark.line + 1}"
    if node in outer:
        raise yaml.YAMLError(f"{line}: an alias of this value is inside the value. Remove it.")
    if len(outer) >= MAX_DEPTH:
        raise yaml.YAMLError(f"{line}: more than {MAX_DEPTH} levels. Nest it less.")
    if node not in known:
        known[node] = 1
        if isinstance(node, yaml.CollectionNode):
            parts = _check_keys(node) if isinstance(node, yaml.MappingNode) else node.value
            known[node] += sum(_count_values(part, (*outer, node), known) for part in parts)
        elif isinstance(node, yaml.ScalarNode) and _is_octal(node):
            # It is 8 in YAML 1.1, and 10 in YAML 1.2 and on the command line.
            raise yaml.YAMLError(
                f"{line}: '{node.value}' is a number to base 8. Leave out its first 0, or quote it if it is text."
            )
    if known[node] > MAX_VALUES:
        raise yaml.YAMLError(
            f"{line}: more than {MAX_VALUES:,} values, with all aliases written out. Use fewer aliases."
        )
    return known[node]


def _is_octal(node: yaml.ScalarNode) -> bool:
    return node.style is None and node.tag.endswith(":int") and _OCTAL.fullmatch(node.value) is not None


def _check_keys(node: yaml.MappingNode) -> list[yaml.Node]:
    """Return keys and values of a mapping without a key given twice and without ``init_args`` of null."""
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in lines:
            raise yaml.YAMLError(
                f"'{key.value}' is given twice, in lines {lines[key.value]} and {line}. Remove one of them."
            )
        lines[key.value] = line
        if key.value == "init_args" and value.tag.endswith(":null"):
            raise yaml.YAMLError(f"line {line}: `init_args` is null. Give settings, or leave it out.")
    return [part for pair in node.value for part in pair]


def _leave_out_base_60(loader: Any) -> None:
    """Let a loader read ``2:30`` as text, as YAML 1.2 does, and not as 150: a typed option then refuses it."""
    for first, resolvers in loader.yaml_implicit_resolvers.items():
        loader.yaml_implicit_resolvers[first] = [
            (tag, re.compile(f"(?!.*:){form.pattern}", form.flags) if tag in _NUMBERS else form)
            for tag, form in resolvers
        ]


class _Checked:
    """A loader of jsonargparse that checks first."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def __call__(self, text: str) -> Any:
        check_yaml(text)
        return self.read(rename_old_paths(text))


def _check_collection(option: str, value: str) -> None:
    """Check the value of an option: jsonargparse would drop the message, and only report the wrong type."""
    try:
        check_yaml(value)
    except yaml.MarkedYAMLError:  # text that is not YAML
        return
    except yaml.YAMLError as error:
        raise ValueError(f"`{option}={value:.300}` cannot be used: {error}") from error


def _check_exists(path: Path) -> None:
    if not path.is_file():
        moved = find_moved_config(path)
        raise ValueError(f"There is no config '{path}'." + (f" It is now '{moved}'." if moved else ""))


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes. Give a YAML file of settings.")
        check_yaml(content.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The config '{path}' cannot be read: {error}. Save it as UTF-8 text.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The config '{path}' cannot be used: {error}") from error
