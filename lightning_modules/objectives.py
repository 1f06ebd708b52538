"""What a training run minimises: how much each token counts, as a function of its long and short log-likelihood."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_modules.functional import soft_influence
from lightning_modules.functional.influence import check_gamma


class Objective(ABC):
    """Weights for the log-likelihoods of a batch; the loss is `long_cross_entropy` with them.

    A weighting of your own is a subclass with one pure function, `influence`. It is pointwise: the weight of a token
    depends on nothing but its own pair of log-likelihoods, so that it can be computed wherever those are.
    """

    uses_short_context: ClassVar[bool]
    """Whether `influence` looks at ``short``; if not, the passes over short windows are saved."""

    largest_weight: float | None = None
    """Cap of the weights, whose share at the cap is logged; None without one."""

    @abstractmethod
    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """``[..]`` weights from ``[..]`` long and short log-likelihoods in nats, all without gradient."""


class CrossEntropy(Objective):
    """Every token counts the same (Equation 5 of Fang et al., 2025)."""

    uses_short_context = False

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(long)


class LongCE(Objective):
    """A token counts as many times more as the long context makes it likelier (Equations 6 and 7 of Fang et al., 2025).

    Args:
        gamma: Largest token weight, 1 or more.

    Raises:
        ValueError: If ``gamma`` is below 1, infinite or not a number.
    """

    uses_short_context = True

    def __init__(self, gamma: float = 5.0) -> None:
        check_gamma(gamma)
        self.gamma = self.largest_weight = gamma

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """`soft_influence`, capped at ``gamma``."""
        return soft_influence(long, short, gamma=self.gamma)
