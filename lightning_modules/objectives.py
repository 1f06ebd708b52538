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

    uses_stored_influence: ClassVar[bool] = False
    """Whether weights come with the rows (`data.influence`); `influence` then gets them in the place of ``short``."""

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


def check_influence(objective: Objective, influence: str | None) -> None:
    """Refuse stored weights that nobody would look at, and an objective that has none to look at.

    Args:
        objective: Of the training.
        influence: Where the stored weights are, if the data module has some (`data.influence`).

    Raises:
        ValueError: If only one of both is there.
    """
    name = type(objective).__name__
    if objective.uses_stored_influence and influence is None:
        raise ValueError(
            f"The objective {name} takes stored token weights, and the data module gives none: make them with"
            " `longce influence` and set `data.influence` to their folder, or choose another `model.objective`."
        )
    if influence is not None and not objective.uses_stored_influence:
        raise ValueError(
            f"The objective {name} would ignore the stored token weights {influence}: set `model.objective` to"
            " StoredInfluence, or leave `data.influence` out."
        )


def check_cap(objective: Objective, stored: float | None) -> None:
    """Refuse stored weights that were capped at a smaller value than the objective says.

    Args:
        objective: Of the training.
        stored: What the stored weights were capped at; None if there are none, or it is not known.

    Raises:
        ValueError: If the objective's cap would have no effect.
    """
    cap = objective.largest_weight
    if objective.uses_stored_influence and stored is not None and cap is not None and stored < cap:
        raise ValueError(
            f"The stored token weights were capped at {stored:g}, below the `gamma` {cap:g} of the objective: set"
            f" `model.objective.gamma` to {stored:g}, or run `longce influence` again with the larger one."
        )


class StoredInfluence(Objective):
    """LongCE with weights that ``longce influence`` computed beforehand: a step costs what cross entropy costs.

    They are those of a fixed evaluator, where LongCE asks the model itself at every step. That is an approximation:
    on the quickstart's models the gradient with another model's weights had a cosine of 0.85 to that of LongCE, and
    plain cross entropy's 0.89.

    Args:
        gamma: Largest token weight, 1 or more. The stored weights were capped when they were made, and are capped
            again at a smaller value.

    Raises:
        ValueError: If ``gamma`` is below 1, infinite or not a number.
    """

    uses_short_context = False
    uses_stored_influence = True

    def __init__(self, gamma: float = 5.0) -> None:
        check_gamma(gamma)
        self.gamma = self.largest_weight = gamma

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """The stored weights, which stand in the place of ``short``, capped at ``gamma``."""
        return short.clamp(max=self.gamma)
