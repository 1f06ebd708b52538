"""Argument checks that do not read tensor values, and so never wait for an accelerator."""

import math
import os
from numbers import Integral
from typing import Any

from torch import Tensor

MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))
"""Largest number of worker processes that an option may ask for on this machine."""

ROUNDING_TOLERANCE = 0.1
"""Nats by which rounding may lift a log-likelihood above 0: 1e-7 in float32, 0.06 if a logit of 20 is bfloat16. Every
corpus has tokens with a larger loss, so a caller who passes losses by mistake still gets an error."""


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


def find_impossible(log_likelihood: Tensor) -> Tensor:
    """Return where log-likelihoods are NaN, infinite, or above 0 by more than rounding, as a mask of the same shape."""
    return ~((log_likelihood <= ROUNDING_TOLERANCE) & (log_likelihood > -math.inf))  # NaN compares as false
