"""Power law of the loss over the context length."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_EXPONENT_RANGE = (-2.0, 0.9)  # powers of 10; a flatter curve is close to a logarithm, a steeper one to a step
_GRID_SIZE = 200
_REFINEMENTS = 6  # of the grid around the best exponent; each makes it a hundred times finer


class PowerLaw(NamedTuple):
    r"""A fitted :math:`L(c) = (a / c)^b + g`."""

    a: float  # context in tokens at which the loss is 1 nat above g; 0 if more context does not lower the loss
    b: float  # exponent
    g: float  # loss with unlimited context, in nats
    r_squared: float  # fraction of the loss's variance that the curve explains; NaN if the loss is constant

    def __call__(self, context: Tensor) -> Tensor:
        """Return the ``[..]`` float64 loss in nats at ``[..]`` context lengths in tokens."""
        return (self.a / context.double()) ** self.b + self.g


def fit_power_law(context: Tensor, loss: Tensor) -> PowerLaw:
    r"""Fit a power law to the loss at several context lengths by least squares.

    .. math:: L(c) = \Big(\frac{a}{c}\Big)^b + g, \quad a, g \ge 0

    Section 4 of Xiong et al. (2023), https://arxiv.org/abs/2309.16039. For a given exponent the other parameters follow
    from linear least squares, so only the exponent is searched, from 0.01 to 8. No starting values are needed.

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
        [8.0, 0.5, 2.0, 1.0]
    """
    if context.shape != loss.shape or context.ndim != 1:
        raise ValueError(f"`context` and `loss` must both be [N], got {list(context.shape)} and {list(loss.shape)}.")
    context, loss = context.double(), loss.double()
    if not (torch.isfinite(context).all() and torch.isfinite(loss).all() and (context > 0).all()):
        raise ValueError("`context` must be finite and above 0, and `loss` finite: omit lengths without a measurement.")
    if len(context.unique()) < 3:
        raise ValueError(f"A power law has 3 parameters: give at least 3 context lengths, got {len(context.unique())}.")
    # 1. Search the exponent on a grid, again and again on a finer one around the best.
    exponents = torch.logspace(*_EXPONENT_RANGE, _GRID_SIZE, dtype=torch.float64)
    for _ in range(_REFINEMENTS):
        best = int(_fit_at_exponents(context, loss, exponents)[2].argmin())
        low, high = exponents[max(best - 1, 0)].item(), exponents[min(best + 1, _GRID_SIZE - 1)].item()
        exponents = torch.linspace(low, high, _GRID_SIZE, dtype=torch.float64)
    factors, constants, errors = _fit_at_exponents(context, loss, exponents)
    best = int(errors.argmin())
    # 2. Express the best fit in the parameters of the equation.
    b, factor, g = float(exponents[best]), float(factors[best]), float(constants[best])
    variance = float((loss - loss.mean()).square().sum())
    r_squared = 1 - float(errors[best]) / variance if variance else math.nan
    return PowerLaw(float(context.min()) * factor ** (1 / b), b, g, r_squared)


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
