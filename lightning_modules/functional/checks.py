"""Arguments that mean nothing are refused before any work: what Python numbers and shapes tell, and no values."""

from numbers import Integral
from typing import Any

from torch import Tensor


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no count: a fraction, NaN, a truth value, or a number out of range.

    Args:
        name: Of the argument, as messages cite it.
        value: The argument; any integer of Python or numpy will do.
        least: Smallest value.
        most: Largest value.

    Raises:
        ValueError: If ``value`` is no integer, or not from ``least`` to ``most``.
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}.")


def check_pair(long: Tensor, short: Tensor) -> None:
    """Refuse log-likelihoods of other tokens than the other ones, which would be broadcast.

    Raises:
        ValueError: If the shapes differ, or either holds no floating point numbers.
    """
    if long.shape != short.shape or not (long.is_floating_point() and short.is_floating_point()):
        raise ValueError(
            "`long` and `short` must be floating point log-likelihoods of one shape,"
            f" got {_kind(long)} and {_kind(short)}."
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
