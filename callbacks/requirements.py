"""Requirements of callbacks on the trainer and its module."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_modules.long_context_lm import LongContextLM


def require_long_context_lm(module: LightningModule, callback: Callback) -> LongContextLM:
    """Return the module of a callback, or raise a ``ValueError`` if it is of another class."""
    if not isinstance(module, LongContextLM):
        raise ValueError(
            f"The callback `{type(callback).__name__}` needs a `LongContextLM`, got a `{type(module).__name__}`: remove"
            " the callback."
        )
    return module


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
