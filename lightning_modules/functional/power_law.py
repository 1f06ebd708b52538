"""Power law of the loss over the context length."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_EXPONENTS = torch.logspace(-2, 0.9, 200, dtype=torch.float64)
"""Exponents from 0.01 to 8: a flatter curve is close to a logarithm, a steeper one to a step."""

_MIN_R_SQUARED = 0.9
_REFINEMENTS = 6  # of the grid around the best exponent; each makes it a hundred times finer


class PowerLaw(NamedTuple):
    r"""A fitted :math:`L(c) = (a / c)^b + g`."""

    a: float  # context in tokens at which the loss is 1 nat above g; 0 if more context does not lower the loss
    b: float  # exponent
    g: float  # loss with unlimited context, in nats
    r_squared: float  # fraction of the loss's variance that the curve explains; NaN if the loss is constant
    b_low: float = math.nan  # 95% interval of the exponent, at most the searched range from 0.01 to 8
    b_high: float = math.nan

    def __call__(self, context: Tensor) -> Tensor:
        """Return the ``[..]`` float64 loss in nats at ``[..]`` context lengths in tokens."""
        return (self.a / context.double()) ** self.b + self.g

    @property
    def is_determined(self) -> bool:
        """Whether R² is at least 0.9, and the 95% interval of the exponent is inside the searched range."""
        inside = _EXPONENTS[0] < self.b_low and self.b_high < _EXPONENTS[-1]
        return self.r_squared >= _MIN_R_SQUARED and bool(inside)


def fit_power_law(context: Tensor, loss: Tensor) -> PowerLaw:
    r"""Fit a power law to the loss at several context lengths by least squares.

    .. math:: L(c) = \Big(\frac{a}{c}\Big)^b + g, \quad a, g \ge 0

    Section 4 of Xiong et al. (2023), https://arxiv.org/abs/2309.16039. For a given exponent the other parameters follow
    from linear least squares, so only the exponent is searched, from 0.01 to 8. No starting values are needed. Its
    interval ends at the nearest exponents whose squared error an F test rejects (profile likelihood).

    Args:
        context: ``[N]`` context lengths in tokens, above 0, at least three different ones.
        loss: ``[N]`` mean loss in nats.

    Returns:
        The curve, computed in float64.

    Raises:
        ValueError: If the shapes differ, a number is not finite, or there are fewer than three lengths.

    Example:
        >>> context = torch.tensor([32.0, 64.0, 128.0, 256.0])
        >>> [round(value, 3) for value in fit_power_law(context, (8 / context) ** 0.5 + 2)]
        [8.0, 0.5, 2.0, 1.0, 0.49, 0.507]
    """
    context = context.double()
    loss = loss.double()
    finite = torch.isfinite(context).all() and torch.isfinite(loss).all() and (context > 0).all()
    if context.shape != loss.shape or context.ndim != 1 or not finite or len(context.unique()) < 3:
        raise ValueError(
            f"`context` and `loss` must both be [N], got {list(context.shape)} and {list(loss.shape)}, and finite, and"
            " `context` above 0, with 3 different lengths or more: omit lengths without a measurement."
        )
    # 1. Search the exponent on a grid, again and again on a finer one around the best.
    exponents = _EXPONENTS
    for _ in range(_REFINEMENTS):
        best = int(_fit_at_exponents(context, loss, exponents)[2].argmin())
        low = exponents[max(best - 1, 0)].item()
        high = exponents[min(best + 1, len(exponents) - 1)].item()
        exponents = torch.linspace(low, high, len(exponents), dtype=torch.float64)
    factors, constants, errors = _fit_at_exponents(context, loss, exponents)
    best = int(errors.argmin())
    # 2. Express the best fit in the parameters of the equation.
    b = float(exponents[best])
    factor = float(factors[best])
    g = float(constants[best])
    variance = float((loss - loss.mean()).square().sum())
    r_squared = 1 - float(errors[best]) / variance if variance else math.nan
    # 3. Reject the exponents that explain the loss clearly worse. Three contexts fit every exponent.
    from scipy import stats  # not where only torch is installed

    freedom = len(context) - 3
    limit = errors[best] * (1 + stats.f.ppf(0.95, 1, freedom) / freedom) if freedom else math.inf
    rejected = _EXPONENTS[_fit_at_exponents(context, loss, _EXPONENTS)[2] > limit].tolist()
    b_low = max((value for value in rejected if value < b), default=float(_EXPONENTS[0]))
    b_high = min((value for value in rejected if value > b), default=float(_EXPONENTS[-1]))
    return PowerLaw(float(context.min()) * factor ** (1 / b), b, g, r_squared, b_low, b_high)


def _fit_at_exponents(context: Tensor, loss: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[E]`` factors of ``(context / shortest) ** -exponent``, constants and sums of squared errors."""
    feature = (context / context.min()) ** -exponents.unsqueeze(-1)  # [E, N], from 0 to 1 for every exponent
    centered = feature - feature.mean(-1, keepdim=True)
    factor = (centered * loss).sum(-1) / centered.square().sum(-1)
    constant = loss.mean() - factor * feature.mean(-1)
    # A parameter below 0 becomes 0, and the other one is fitted again.
    through_zero = (feature * loss).sum(-1) / feature.square().sum(-1)
    factor = torch.where(constant < 0, through_zero, factor).clamp(min=0)
    constant = torch.where(factor > 0, constant, loss.mean()).clamp(min=0)
    errors = (factor.unsqueeze(-1) * feature + constant.unsqueeze(-1) - loss).square().sum(-1)
    return factor, constant, errors
