"""Refuse callbacks that log under the same names."""

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import Callback, Trainer

Kind = TypeVar("Kind", bound=Callback)


def check_single(trainer: Trainer, kind: type[Kind], describe: Callable[[Kind], object], names: str) -> None:
    """Refuse several callbacks of one kind: Lightning would silently average their values under the same names."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]
    if len(callbacks) > 1:
        raise ValueError(
            f"{len(callbacks)} `{kind.__name__}` callbacks ({' and '.join(str(describe(each)) for each in callbacks)})"
            f" log under the same names ({names}), and Lightning would average their values: keep one, and use the"
            " others in separate runs of `longce validate`."
        )


def check_names(trainer: Trainer, kind: type[Any]) -> int:
    """Return the number of callbacks of a kind; raise a ``ValueError`` if several have the same ``name``, or none."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]
    names = [callback.name for callback in callbacks]
    if len(names) > 1 and (None in names or len(set(names)) < len(names)):
        raise ValueError(
            f"{len(callbacks)} `{kind.__name__}` callbacks log under the same names, and Lightning would average their"
            f" values: give each another `name`, got {names}."
        )
    return len(callbacks)
