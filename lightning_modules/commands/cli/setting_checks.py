"""Check values that pass jsonargparse's types and would crash a class later, or train the wrong way."""

import inspect
import os
import typing
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from jsonargparse import Namespace

from lightning_modules.utilities.user_modules import import_object

_MIN_VALUES = {"max_queue": 0, "flush_secs": 0, "purge_step": 0, "flush_logs_every_n_steps": 1}
"""Smallest values of loggers' arguments that are whole numbers, and that torch and Lightning leave without a type."""

_TRAINER_MIN_VALUES = {
    "accumulate_grad_batches": 1,
    "val_check_interval": 0,
    "gradient_clip_val": 0,
    "limit_train_batches": 0,
}
"""Smallest values; 0 itself only where it switches something off."""


def check_settings(settings: Any, kind: type | None, path: str) -> None:
    """Refuse null where a class needs a value, and numbers of loggers that are not numbers.

    Args:
        settings: Arguments as parsed, in which other classes may be nested.
        kind: The class that takes them, or None.
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


def check_trainer(options: Mapping[str, Any] | Namespace) -> None:
    """Raise a ``ValueError`` for numbers that Lightning's Trainer accepts, and that make no sense for training."""
    for name, limit in _TRAINER_MIN_VALUES.items():
        value = options.get(name)
        off = name == "gradient_clip_val"
        if isinstance(value, int | float) and (value < limit or (value == 0 and not off)):
            wanted = "1 or more" if limit else "0 or more" if off else "above 0"
            raise ValueError(f"`trainer.{name}` must be {wanted}, got {value}. Leave it out for Lightning's default.")
    limit, devices = max(64, 4 * (os.cpu_count() or 1)), str(options.get("devices"))
    if devices.isdecimal() and int(devices) > limit:
        raise ValueError(f"`trainer.devices` = {devices} exceeds the limit for this machine: {limit} at most.")
