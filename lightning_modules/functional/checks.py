"""Checks of numbers and shapes before any work; they read no values of tensors."""

import os
from numbers import Integral
from typing import Any

from torch import Tensor

MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))
"""Largest number of processes of one kind that this machine is asked for."""


def check_count(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise a ``ValueError`` unless the argument of that name is an integer from ``minimum`` to ``maximum``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        limits = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum:,}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}.")


def check_pair(long: Tensor, short: Tensor) -> None:
    """Raise a ``ValueError`` for log-likelihoods of different shapes, which would be broadcast, or of integers."""
    if long.shape != short.shape or not (long.is_floating_point() and short.is_floating_point()):
        kinds = [f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in (long, short)]
        raise ValueError(
            f"`long` and `short` must be floating point log-likelihoods of one shape, got {' and '.join(kinds)}."
        )
