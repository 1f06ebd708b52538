"""What a training run minimises: how much each token counts, as a function of its long and short log-likelihood."""

import copy
from abc import ABC, abstractmethod

import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor

from lightning_modules.functional import mutual_information, soft_influence, threshold_influence
from lightning_modules.functional.influence import Part, check_gamma, check_part, check_threshold


class Objective(ABC):
    """Weights for the log-likelihoods of a batch; the loss is `long_cross_entropy` with them.

    A weighting of your own is a subclass with one pure function, `influence`. It is pointwise: the weight of a token
    depends on nothing but its own pair of log-likelihoods, so that it can be computed wherever those are.
    """

    uses_short_context: bool
    """Whether `influence` looks at ``short``; if not, the passes over short windows are saved."""

    uses_stored_influence: bool = False
    """Whether weights come with the rows (`data.influence`); `influence` then gets them in the place of ``short``."""

    largest_weight: float | None = None
    """Cap of the weights, whose share at the cap is logged; None without one."""

    normalised: bool = False
    """Whether the loss of an optimizer step is divided by the sum of the weights of all its scored tokens, so that
    their mean is 1, instead of by the number of these tokens."""

    @abstractmethod
    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """``[..]`` weights from ``[..]`` long and short log-likelihoods in nats, all without gradient."""

    def at_step(self, step: int) -> "Objective":
        """The objective of one optimizer step, for those that change in training.

        Args:
            step: Optimizer steps before this one.
        """
        return self


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


class MutualInformation(Objective):
    """A token counts by what the far context says of it: PPMI, NPMI and dense weights of Helm et al. (2025).

    Their paper (https://arxiv.org/abs/2503.09202) scales the weights of each row to a mean of 1, and takes uniform ones
    where all are 0. Here they are scaled over all tokens of an optimizer step, and a step of zeros changes nothing.
    Their dense weights are ``part: absolute``; interpolate them with cross entropy (`Interpolated`), as they do.

    Args:
        part: ``positive`` for tokens that the long context makes likelier, ``negative`` for those that it makes less
            likely, ``absolute`` for both.
        shift: How many times likelier one context must make a token than the other; above 0, and 1 for ``absolute``.

    Raises:
        ValueError: If ``part`` is unknown or ``shift`` has no meaning.
    """

    uses_short_context = True
    normalised = True

    def __init__(self, part: Part = "positive", shift: float = 1.0) -> None:
        check_part(part, shift)
        self.part: Part = part
        self.shift = shift

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """`mutual_information`."""
        return mutual_information(long, short, part=self.part, shift=self.shift)


class Sparse(Objective):
    """Only tokens that the far context changes by more than a threshold count: sparse weights of Helm et al. (2025).

    Their paper (https://arxiv.org/abs/2503.09202) takes a fixed share of each row's tokens. The weights are scaled to a
    mean of 1 over all tokens of an optimizer step; a step without such tokens changes nothing.

    Args:
        threshold: Of the difference of log-likelihoods, in nats; 0 or more.

    Raises:
        ValueError: If ``threshold`` is negative, infinite or not a number.
    """

    uses_short_context = True
    normalised = True

    def __init__(self, threshold: float = 0.5) -> None:
        check_threshold(threshold)
        self.threshold = threshold

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """`threshold_influence`."""
        return threshold_influence(long, short, threshold=self.threshold)


class Wrapper(Objective):
    """An objective made of another one, and like it unless it says otherwise.

    Args:
        objective: The other one.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.uses_short_context = objective.uses_short_context
        self.uses_stored_influence = objective.uses_stored_influence
        self.largest_weight = objective.largest_weight
        self.normalised = objective.normalised

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """That of the other one."""
        return self.objective.influence(long, short)

    def at_step(self, step: int) -> Objective:
        """Of the other objective at that step."""
        inner = self.objective.at_step(step)
        if inner is self.objective:
            return self
        wrapper = copy.copy(self)
        wrapper.objective = inner
        wrapper.uses_short_context = inner.uses_short_context
        wrapper.largest_weight = inner.largest_weight
        return wrapper


def innermost(objective: Objective) -> Objective:
    """What is left of an objective without its wrappers."""
    while isinstance(objective, Wrapper):
        objective = objective.objective
    return objective


class Normalised(Wrapper):
    """The weights of another objective, scaled so that their mean is 1 over all scored tokens of an optimizer step.

    The sum is that of all batches and processes of the step. Without it the gradient of LongCE is larger than that of
    cross entropy where its weights are above 1 on average. The logged weights are those before the scaling.

    Args:
        objective: Whose weights they are.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self.normalised = True


class Interpolated(Wrapper):
    r"""A mean of cross entropy and another objective.

    .. math:: w_t = \lambda + (1 - \lambda) I_t

    Of an objective that is normalised the weights are mixed first, and scaled to a mean of 1 then. Helm et al. (2025),
    https://arxiv.org/abs/2503.09202, scale first. The losses are the same for weights whose mean is 1 as they are; with
    another mean :math:`m`, our :math:`\lambda` is their :math:`\lambda / (\lambda + (1 - \lambda) m)`.

    Args:
        objective: The other one.
        cross_entropy_share: Share of cross entropy, from 0 to 1.

    Raises:
        ValueError: If ``cross_entropy_share`` is not in [0, 1].
    """

    def __init__(self, objective: Objective, cross_entropy_share: float = 0.5) -> None:
        if not 0 <= cross_entropy_share <= 1:
            raise ValueError(
                f"`cross_entropy_share` must be from 0 to 1, which is cross entropy, {cross_entropy_share=}."
            )
        super().__init__(objective)
        self.cross_entropy_share = cross_entropy_share
        if objective.largest_weight is not None:
            self.largest_weight = cross_entropy_share + (1 - cross_entropy_share) * objective.largest_weight

    def influence(self, long: Tensor, short: Tensor) -> Tensor:
        """The mean of 1 and the other weight."""
        other, cap = self.objective.influence(long, short), self.objective.largest_weight
        weight = self.cross_entropy_share + (1 - self.cross_entropy_share) * other
        if cap is None or self.largest_weight is None:
            return weight
        # Or rounding would decide what is at the cap.
        return torch.where(other >= torch.tensor(cap, dtype=other.dtype), self.largest_weight, weight)

    def at_step(self, step: int) -> Objective:
        """Of the other objective at that step."""
        return Interpolated(self.objective.at_step(step), self.cross_entropy_share)


class Scheduled(Wrapper):
    """Another objective for a part of the training, with a warm-up of its weights; cross entropy before and after.

    Where it is cross entropy, it costs what cross entropy costs: there is no short pass.

    Args:
        objective: The other one.
        start: Optimizer step with which it begins, counted from 0.
        warmup: Over so many steps the weights go from 1 to the full ones.
        stop: Optimizer step from which on it is cross entropy again; null for never.

    Raises:
        ValueError: If ``start`` or ``warmup`` is negative, or ``stop`` leaves no step with weights.
    """

    def __init__(
        self,
        objective: Objective,
        start: NonNegativeInt = 0,
        warmup: NonNegativeInt = 0,
        stop: NonNegativeInt | None = None,
    ) -> None:
        for name, value in (("start", start), ("warmup", warmup)):
            if value < 0:
                raise ValueError(f"`{name}` counts optimizer steps, so it must be 0 or more, got {value}.")
        first = start + (warmup > 0)  # the warm-up begins with a weight of 1
        if stop is not None and stop <= first:
            raise ValueError(f"`stop` must be above {first}, or no step has weights, got {stop}.")
        super().__init__(objective)
        self.start, self.warmup, self.stop = start, warmup, stop

    def at_step(self, step: int) -> Objective:
        """Cross entropy, a mean of it and the other objective, or the other objective."""
        if step < self.start or (self.stop is not None and step >= self.stop):
            return CrossEntropy()
        objective, passed = self.objective.at_step(step), step - self.start
        if passed >= self.warmup:
            return objective
        return Interpolated(objective, 1 - passed / self.warmup) if passed else CrossEntropy()


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


def check_normalised(objective: Objective, window_share: float) -> None:
    """Refuse to divide by a sum of weights that may be 0 or below.

    Args:
        objective: Of the training.
        window_share: Share of the short windows that is computed.

    Raises:
        ValueError: If the objective is normalised and some windows are left out.
    """
    if objective.normalised and window_share < 1:
        raise ValueError(
            f"The objective {type(objective).__name__} divides by the sum of its weights, and those of windows drawn at"
            f" random can be below 0: set `model.short_window_share` to 1 instead of {window_share}, or choose an"
            " objective like LongCE."
        )


def check_cap(objective: Objective, stored: float | None) -> None:
    """Refuse stored weights that were capped at a smaller value than the objective says.

    Args:
        objective: Of the training.
        stored: What the stored weights were capped at; None if there are none, or it is not known.

    Raises:
        ValueError: If the objective's cap would have no effect.
    """
    objective = innermost(objective)
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
