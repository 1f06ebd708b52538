"""Argument checks that do not read tensor values, and so never wait for an accelerator."""

import os
from numbers import Integral
from typing import Any

from torch import Tensor

MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))
"""Largest number of worker processes that an option may ask for on this machine."""


def check_count(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise a ``ValueError`` that cites ``name`` unless ``value`` is an integer from ``minimum`` to ``maximum``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        limits = f"of {minimum} or more" if maximum is None else f"from {minimum} to {maximum:,}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}.")


def check_fraction(name: str, value: float) -> None:
    """Raise a ``ValueError`` that cites ``name`` unless ``value`` is in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}.")


def check_pair(long: Tensor, short: Tensor) -> None:
    """Raise a ``ValueError`` for log-likelihoods that are integers, or whose shapes differ and would be broadcast."""
    if long.shape != short.shape or not (long.is_floating_point() and short.is_floating_point()):
        kinds = [f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}" for given in (long, short)]
        raise ValueError(
            f"`long` and `short` must be floating-point log-likelihoods of the same shape, got {' and '.join(kinds)}."
        )
