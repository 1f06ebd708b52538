"""Refuse callbacks that log under the same names."""

from typing import Any

from lightning.pytorch import Trainer


def check_names(trainer: Trainer, kind: type[Any]) -> int:
    """Return the number of callbacks of a kind; raise a ``ValueError`` if several have the same ``name``, or none."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]
    names = [getattr(callback, "name", None) for callback in callbacks]
    if len(names) > 1 and (None in names or len(set(names)) < len(names)):
        raise ValueError(
            f"{len(callbacks)} `{kind.__name__}` callbacks log under the same names, and Lightning would average their"
            " values: keep one, or give each another `name` if it has one."
        )
    return len(callbacks)
