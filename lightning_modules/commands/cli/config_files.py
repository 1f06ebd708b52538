"""YAML that says one thing once and stays small: what jsonargparse reads configs and option values with."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse._loaders_dumpers import get_yaml_default_loader

LARGEST = 1 << 20
"""Bytes of a config file."""

LARGEST_NODES = 100_000
"""Values of a config, when what its aliases stand for is written out: nine lines of aliases can be billions."""

DEEPEST = 50
"""Levels of nesting of a config."""

_OCTAL = re.compile(r"[-+]?0[0-7_]*[1-7][0-7_]*")
_NULLS = ("", "~", "null", "Null", "NULL")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class _Collection:
    """A mapping or sequence that is being read."""

    anchor: str | None
    is_mapping: bool
    size: int = 1
    entries: int = 0
    keys: dict[str, int] = field(default_factory=dict)


def use_checked_yaml() -> None:
    """Let jsonargparse check YAML before it reads it, and read ``2:30`` as text. Further calls change nothing."""
    read = jsonargparse.get_loader("yaml")
    if not isinstance(read, _Checked):
        jsonargparse.set_loader("yaml", _Checked(read), (yaml.YAMLError,))
        _leave_out_base_60(get_yaml_default_loader())  # which reads the values of single options


def check_config_files(arguments: Sequence[str]) -> None:
    """Check the configs, mappings and lists in a command line, so that a message can name the file or the option.

    Args:
        arguments: Words of the command line, in which ``-c`` and ``--config`` stand before files.

    Raises:
        ValueError: If one cannot be read, is too large, no UTF-8, or no YAML that says each thing once, or if a value
            has a key twice or a number to base 8.
    """
    for index, word in enumerate(arguments):
        option, _, value = word.partition("=")
        value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
        if option in ("-c", "--config") and os.path.isfile(value):
            _check_file(Path(value))
        elif option.startswith("--") and value.startswith(("{", "[")):
            _check_collection(option, value)


def check_yaml(text: str) -> None:
    """Refuse YAML with a key given twice, of which one would be ignored, or too large or deep when written out.

    Raises:
        yaml.YAMLError: Naming the key and its lines, the limit, or a number that is not what it seems.
    """
    collections, sizes = [_Collection(None, False)], dict[str, int]()
    event: Any  # of which PyYAML's types say that marks may be missing
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            collections.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            _check_nesting(event, collections)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = collections.pop()
            if done.anchor is not None:
                sizes[done.anchor] = done.size
            _add(collections[-1], event, done.size)
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event, collections[-1])
            _add(collections[-1], event, 1)
        elif isinstance(event, yaml.AliasEvent):
            _add(collections[-1], event, _size_of_alias(event, collections, sizes))


def _size_of_alias(event: Any, collections: Sequence[_Collection], sizes: Mapping[str, int]) -> int:
    if any(event.anchor == outer.anchor for outer in collections):
        raise yaml.YAMLError(f"line {event.start_mark.line + 1}: '*{event.anchor}' stands within itself. Remove it.")
    return sizes.get(event.anchor, 1)  # of a single value


def _check_scalar(event: Any, collection: _Collection) -> None:
    """Refuse ``init_args`` of null, and ``010``, which is 8 in YAML 1.1 and 10 in YAML 1.2 and on the command line."""
    is_value = collection.is_mapping and collection.entries % 2 == 1
    is_null = is_value and event.implicit[0] and event.value in _NULLS
    if is_null and next(reversed(collection.keys), "") == "init_args":
        raise yaml.YAMLError(f"line {event.start_mark.line + 1}: `init_args` is null. Give settings, or leave it out.")
    if event.implicit[0] and _OCTAL.fullmatch(event.value):
        raise yaml.YAMLError(
            f"line {event.start_mark.line + 1}: '{event.value}' is a number to base 8. Leave out its first 0, or quote"
            " it if it is text."
        )


def _leave_out_base_60(loader: Any) -> None:
    """Let a loader read ``2:30`` as text, as YAML 1.2 does, and not as 150: a typed option then refuses it."""
    for first, resolvers in loader.yaml_implicit_resolvers.items():
        loader.yaml_implicit_resolvers[first] = [
            (tag, re.compile(f"(?!.*:){form.pattern}", form.flags) if tag in _NUMBERS else form)
            for tag, form in resolvers
        ]


def _check_nesting(event: Any, collections: Sequence[_Collection]) -> None:
    if len(collections) > DEEPEST:
        raise yaml.YAMLError(f"line {event.start_mark.line + 1}: more than {DEEPEST} levels. Nest it less.")


def _add(collection: _Collection, event: Any, size: int) -> None:
    collection.size += size
    if collection.size > LARGEST_NODES:
        raise yaml.YAMLError(
            f"line {event.start_mark.line + 1}: more than {LARGEST_NODES:,} values, with all aliases written out."
            " Use fewer aliases."
        )
    is_key = collection.is_mapping and collection.entries % 2 == 0
    collection.entries += 1
    if is_key and hasattr(event, "value"):  # an alias and a collection have none
        line = event.start_mark.line + 1
        if event.value in collection.keys:
            first = collection.keys[event.value]
            raise yaml.YAMLError(f"'{event.value}' is given twice, in lines {first} and {line}. Remove one of them.")
        collection.keys[event.value] = line


class _Checked:
    """A loader of jsonargparse that checks first."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def __call__(self, text: str) -> Any:
        check_yaml(text)
        return self.read(text)


def _check_collection(option: str, value: str) -> None:
    """Check the value of an option: jsonargparse would drop the message, and only report the wrong type."""
    try:
        check_yaml(value)
    except yaml.MarkedYAMLError:  # text that is not YAML
        return
    except yaml.YAMLError as error:
        raise ValueError(f"`{option}={value:.300}` cannot be used: {error}") from error


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes. Give a YAML file of settings.")
        check_yaml(content.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The config '{path}' cannot be read: {error}. Save it as UTF-8 text.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"The config '{path}' cannot be used: {error}") from error
