"""Check values that jsonargparse accepts for a class and that the class does not: nulls, and untyped arguments."""

import inspect
import typing
from collections.abc import Iterator
from types import NoneType
from typing import Any

from jsonargparse import Namespace

from lightning_modules.utilities.user_modules import import_object

_MIN_VALUES = {"max_queue": 0, "flush_secs": 0, "purge_step": 0, "flush_logs_every_n_steps": 1}
"""Smallest values of loggers' arguments that are whole numbers, and that torch and Lightning leave without a type."""


def check_settings(settings: Any, kind: type | None, path: str) -> None:
    """Refuse null where a class needs a value, and numbers of loggers that are not numbers.

    Args:
        settings: Arguments as parsed, in which other classes may be nested.
        kind: The class that takes them; None if there is none.
        path: How messages name the settings.

    Raises:
        ValueError: Naming the option and the value.
    """
    if isinstance(settings, Namespace | dict) and "class_path" in settings:
        kind, settings = import_object(settings["class_path"]), settings.get("init_args") or {}
        path = f"{path}.init_args"
    for name, value in _entries(settings):
        option = f"{path}.{name}"
        if value is None and isinstance(kind, type) and _needs_value(kind, name):
            raise ValueError(f"`{option}` is null, and {kind.__name__} needs a value: give one, or leave `{name}` out.")
        least = _MIN_VALUES.get(name)
        if least is not None and value is not None and (type(value) is not int or value < least):
            raise ValueError(f"`{option}` must be a whole number of {least} or more, got {value!r}.")
        check_settings(value, None, option)


def _entries(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in a mapping, and the indices and elements of a list."""
    if isinstance(settings, Namespace):
        settings = vars(settings)
    if isinstance(settings, dict):
        yield from ((str(name), value) for name, value in settings.items())
    elif isinstance(settings, list):
        yield from ((str(index), value) for index, value in enumerate(settings))


def _needs_value(kind: type, name: str) -> bool:
    """Whether the type of an argument excludes None; a class may pass the argument on to one that it derives from."""
    for base in kind.__mro__:
        parameter = inspect.signature(base.__init__).parameters.get(name)  # type: ignore[misc]
        if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
            try:
                hint = typing.get_type_hints(base.__init__).get(name, Any)  # type: ignore[misc]
            except NameError:  # of a type that is imported for type checkers only
                return False
            return parameter.default is not None and hint not in (Any, None) and NoneType not in typing.get_args(hint)
    return False
