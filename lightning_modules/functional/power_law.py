"""Power law of the loss over the length of the context."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_LOG_EXPONENTS = (-2.0, 0.9)  # of base 10: a flatter curve is a logarithm, a steeper one a step
_GRID = 200
_SHRINKINGS = 80  # of the interval around the best exponent, by the golden section


class PowerLaw(NamedTuple):
    r"""A fitted :math:`L(c) = (a / c)^b + g`.

    Attributes:
        a: Context at which 1 nat is left to gain, in tokens; 0 if context does not lower the loss.
        b: Exponent.
        g: Loss at unlimited context, in nats.
        r_squared: Fraction of the loss's variance that the curve explains; NaN if the loss is constant.
    """

    a: float
    b: float
    g: float
    r_squared: float

    def __call__(self, context: Tensor) -> Tensor:
        """Return ``[..]`` float64 loss in nats at ``[..]`` contexts in tokens."""
        return (self.a / context.double()) ** self.b + self.g


def fit_power_law(context: Tensor, loss: Tensor) -> PowerLaw:
    r"""Fit the loss at each length of context by least squares.

    .. math:: L(c) = \Big(\frac{a}{c}\Big)^b + g, \quad a, g \ge 0

    Section 4 of Xiong et al. (2023), https://arxiv.org/abs/2309.16039. For a given exponent the rest is linear, so only
    the exponent is searched, between 0.01 and 8: no starting values are needed, and the others have no local minimum.

    Args:
        context: ``[N]`` lengths of context in tokens, above 0, at least three different ones.
        loss: ``[N]`` mean loss in nats.

    Returns:
        The curve; computed in float64.

    Raises:
        ValueError: If shapes disagree, a number is not finite, or there are fewer than three lengths.

    Example:
        >>> context = torch.tensor([32.0, 64.0, 128.0, 256.0])
        >>> [round(value, 3) for value in fit_power_law(context, (8 / context) ** 0.5 + 2)]
        [8.0, 0.5, 2.0, 1.0]
    """
    if context.shape != loss.shape or context.ndim != 1:
        raise ValueError(f"`context` and `loss` must both be [N], got {list(context.shape)} and {list(loss.shape)}.")
    context, loss = context.double(), loss.double()
    if not (torch.isfinite(context).all() and torch.isfinite(loss).all() and (context > 0).all()):
        raise ValueError("Contexts must be above 0, and contexts and losses finite: leave out what was not measured.")
    if len(context.unique()) < 3:
        raise ValueError(f"A power law has three parameters: give 3 lengths of context, got {len(context.unique())}.")
    points = _Points(context.tolist(), loss.tolist())
    low, high = _LOG_EXPONENTS
    exponents = [10 ** (low + (high - low) * step / (_GRID - 1)) for step in range(_GRID)]
    best = min(range(_GRID), key=lambda index: points.fit(exponents[index])[2])
    low, high = exponents[max(best - 1, 0)], exponents[min(best + 1, _GRID - 1)]
    golden = (5**0.5 - 1) / 2
    for _ in range(_SHRINKINGS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if points.fit(left)[2] <= points.fit(right)[2]:
            high = right
        else:
            low = left
    b = (low + high) / 2
    factor, g, error = points.fit(b)
    variance = math.fsum((value - points.mean) ** 2 for value in points.loss)
    return PowerLaw(factor ** (1 / b), b, g, 1 - error / variance if variance else math.nan)


class _Points:
    """Points to be fitted; plain numbers, since a tensor's sums depend on its memory alignment."""

    def __init__(self, context: list[float], loss: list[float]) -> None:
        self.context, self.loss = context, loss
        self.shortest = min(context)
        self.mean = _mean(loss)

    def fit(self, b: float) -> tuple[float, float, float]:
        """Return the factor of ``c**-b`` and the constant, both 0 or more, and the remaining sum of squares."""
        feature = [(c / self.shortest) ** -b for c in self.context]  # between 0 and 1, whatever the exponent
        middle = _mean(feature)
        spread = math.fsum((f - middle) ** 2 for f in feature)
        slope = math.fsum((f - middle) * value for f, value in zip(feature, self.loss, strict=True)) / spread
        through_zero = math.fsum(f * value for f, value in zip(feature, self.loss, strict=True))
        candidates = [
            (slope, self.mean - slope * middle),
            (max(through_zero / math.fsum(f * f for f in feature), 0.0), 0.0),
            (0.0, max(self.mean, 0.0)),
        ]
        error, factor, g = min((self._error(feature, f, g), f, g) for f, g in candidates if f >= 0 and g >= 0)
        return factor * self.shortest**b, g, error

    def _error(self, feature: list[float], factor: float, g: float) -> float:
        return math.fsum((factor * f + g - value) ** 2 for f, value in zip(feature, self.loss, strict=True))


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
