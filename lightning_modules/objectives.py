"""Training objectives: how much each token counts in the loss, as a function of its long and short log-likelihood."""

import copy
from abc import ABC, abstractmethod
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import (
    ShortContext,
    mutual_information,
    soft_influence,
    threshold_weights,
    top_fraction_weights,
)
from lightning_modules.functional.influence import Part, check_fraction, check_gamma, check_part, check_threshold


class Objective(ABC):
    """Weights for the tokens of a batch; the loss is `long_cross_entropy` with them.

    A weighting of your own is a subclass with one pure function, `token_weights`.
    """

    uses_short_context: bool = True
    """Whether `token_weights` looks at ``short``; if not, the passes over short windows are saved."""

    pointwise: bool = True
    """Whether the weight of a token depends on no other token, so that short windows can be left out at random."""

    uses_stored_influence: bool = False
    """Whether weights come with the batch (`data.influence`)."""

    largest_weight: float | None = None
    """Cap of the weights; the fraction of tokens at the cap is logged. None without one."""

    normalized: bool = False
    """Whether the loss of an optimizer step is divided by the sum of its weights, instead of the number of tokens."""

    @abstractmethod
    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weight of each token; what it is for a token that is not scored does not matter.

        Args:
            long: ``[B, T]`` log-likelihoods given everything before the token, in nats; 0 where it is not scored.
            short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
            batch: The whole sequences, also where several processes share them.
        """

    @torch.no_grad()
    def __call__(self, long: Tensor, short: ShortContext | None, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` token weights, 0 where a token is not scored.

        If only some windows were scored, the weights of their tokens are scaled up around those of tokens without a
        short context, so that weights are right on average: ``1 + (I - 1) / fraction`` for LongCE. They can be below 0.
        """
        weights = self.token_weights(long, long if short is None else short.fill_missing(long), batch)
        if short is not None and short.window_fraction < 1:
            unhelped = self.token_weights(long, long, batch)
            weights = unhelped + (weights - unhelped) / short.window_fraction
        return weights.to(long.dtype).masked_fill(batch["labels"].eq(IGNORE_INDEX), 0)

    def __init_subclass__(cls) -> None:
        if "influence" in vars(cls):
            rank_zero_warn(f"`{cls.__name__}.influence(long, short)`: call it `token_weights(long, short, batch)`.")
            cls.token_weights = lambda self, long, short, _: self.influence(long, short)  # type: ignore
        if "normalised" in vars(cls):
            rank_zero_warn(f"`{cls.__name__}.normalised`: call it `normalized`.")
            cls.normalized = vars(cls)["normalised"]

    def at_step(self, step: int) -> "Objective":
        """Return the objective of an optimizer step, counted from 0, for those that change in training."""
        return self


class CrossEntropy(Objective):
    """Every token counts the same (Equation 5 of Fang et al., 2025)."""

    uses_short_context = False

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return ones."""
        return torch.ones_like(long)


class LongCE(Objective):
    """A token is weighted by how many times likelier the long context makes it (Equations 6, 7 of Fang et al., 2025).

    Args:
        gamma: Largest token weight, 1 or more.
    """

    def __init__(self, gamma: float = 5.0) -> None:
        check_gamma(gamma)
        self.gamma = self.largest_weight = gamma

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """`soft_influence`, capped at ``gamma``."""
        return soft_influence(long, short, gamma=self.gamma)


class StoredInfluence(LongCE):
    """LongCE with weights that ``longce influence`` computed beforehand: a step costs what cross entropy costs.

    They are those of a fixed evaluator: an approximation of LongCE, which asks the model itself at every step.

    Args:
        gamma: Largest token weight, 1 or more; the stored weights are capped at it again.
    """

    uses_short_context = False
    uses_stored_influence = True

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the stored weights of the batch, capped at ``gamma``."""
        return batch["influence"].clamp(max=self.gamma)


class MutualInformation(Objective):
    """A token is weighted by its mutual information with the far context (PPMI, NPMI, dense; Helm et al., 2025).

    The weights are scaled to a mean of 1 over all scored tokens of an optimizer step; a step of zeros changes nothing.
    The paper (https://arxiv.org/abs/2503.09202) scales them over each sequence: ``Normalized`` with ``mean_over:
    sequence``. Its dense weights are ``part: absolute``, interpolated with cross entropy (`Interpolated`).

    Args:
        part: ``positive`` for tokens that the long context makes likelier, ``negative`` for those that it makes less
            likely, ``absolute`` for both.
        shift: How many times likelier one context must make a token than the other; above 0, and 1 for ``absolute``.
    """

    normalized = True

    def __init__(self, part: Part = "positive", shift: float = 1.0) -> None:
        check_part(part, shift)
        self.part: Part = part
        self.shift = shift

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """`mutual_information`."""
        return mutual_information(long, short, part=self.part, shift=self.shift)


class Sparse(Objective):
    """Only tokens that the far context changes much count: sparse weights of Helm et al. (2025).

    They are scaled as those of `MutualInformation`. In the paper they are a ``fraction`` of each sequence.

    Args:
        threshold: Smallest difference of log-likelihoods, in nats; 0 or more.
        fraction: Instead of a threshold, take this fraction of each sequence, the tokens whose difference is largest.
    """

    normalized = True

    def __init__(self, threshold: float = 0.5, fraction: float | None = None) -> None:
        check_threshold(threshold)
        check_fraction(1.0 if fraction is None else fraction)
        self.threshold, self.fraction, self.pointwise = threshold, fraction, fraction is None

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """`threshold_weights` or `top_fraction_weights`."""
        if self.fraction is None:
            return threshold_weights(long, short, threshold=self.threshold)
        return top_fraction_weights(long, short, batch["labels"].ne(IGNORE_INDEX), fraction=self.fraction)


class Wrapper(Objective):
    """An objective made from another one, whose properties it has by default."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.uses_short_context = objective.uses_short_context
        self.uses_stored_influence = objective.uses_stored_influence
        self.largest_weight = objective.largest_weight
        self.normalized = objective.normalized
        self.pointwise = objective.pointwise

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weights of the other one."""
        return self.objective.token_weights(long, short, batch)

    def at_step(self, step: int) -> Objective:
        """Return the same around the other objective at that step."""
        inner = self.objective.at_step(step)
        if inner is self.objective:
            return self
        wrapper = copy.copy(self)
        wrapper.objective = inner
        wrapper.uses_short_context = inner.uses_short_context
        if self.largest_weight is not None:
            wrapper.largest_weight = inner.largest_weight
        return wrapper


def innermost(objective: Objective) -> Objective:
    """Return an objective without its wrappers."""
    while isinstance(objective, Wrapper):
        objective = objective.objective
    return objective


class Normalized(Wrapper):
    """The weights of another objective, scaled so that their mean is 1.

    Args:
        objective: The other one.
        mean_over: ``step``: over all scored tokens of all batches and processes of an optimizer step; the logged
            weights are those before the scaling. ``sequence``: over each training sequence by itself, as Helm et al.
            (2025) do; a sequence whose weights are all 0 gets weights of 1.
    """

    def __init__(self, objective: Objective, mean_over: Literal["step", "sequence"] = "step") -> None:
        super().__init__(objective)
        self.mean_over = mean_over
        self.normalized = mean_over == "step"
        if not self.normalized:
            self.pointwise, self.largest_weight = False, None

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the other weights, scaled over each sequence; a mean over a step is known at its end."""
        weights = self.objective.token_weights(long, short, batch)
        if self.normalized:
            return weights
        scored = batch["labels"].ne(IGNORE_INDEX)
        total = weights.masked_fill(~scored, 0).sum(-1, keepdim=True)
        return torch.where(total > 0, weights * scored.sum(-1, keepdim=True) / total, 1.0)


class Normalised(Normalized):
    """Deprecated name of `Normalized`."""

    def __init__(self, objective: Objective) -> None:
        rank_zero_warn("The objective `Normalised` is now called `Normalized`: the old name will be removed.")
        super().__init__(objective)


class Interpolated(Wrapper):
    r"""A mean of cross entropy and another objective.

    .. math:: w_t = \lambda + (1 - \lambda) I_t

    Weights that are scaled over an optimizer step are mixed first, and scaled to a mean of 1 then. Helm et al. (2025)
    scale each sequence first: interpolate a ``Normalized`` objective with ``mean_over: sequence``.

    Args:
        objective: The other one.
        cross_entropy_share: Share of cross entropy, from 0 to 1.
    """

    def __init__(self, objective: Objective, cross_entropy_share: float = 0.5) -> None:
        if not 0 <= cross_entropy_share <= 1:
            raise ValueError(f"`cross_entropy_share` must be from 0 to 1, got {cross_entropy_share=}.")
        super().__init__(objective)
        self.cross_entropy_share = cross_entropy_share
        if objective.largest_weight is not None:
            self.largest_weight = cross_entropy_share + (1 - cross_entropy_share) * objective.largest_weight

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the mean of 1 and the other weight."""
        other, cap = self.objective.token_weights(long, short, batch), self.objective.largest_weight
        weight = self.cross_entropy_share + (1 - self.cross_entropy_share) * other
        if cap is None or self.largest_weight is None:
            return weight
        # Or rounding would decide what is at the cap.
        return torch.where(other >= torch.tensor(cap, dtype=other.dtype), self.largest_weight, weight)

    def at_step(self, step: int) -> Objective:
        """Return the same around the other objective at that step."""
        return Interpolated(self.objective.at_step(step), self.cross_entropy_share)


class Scheduled(Wrapper):
    """Another objective for a part of the training, with a warm-up of its weights; cross entropy before and after.

    Where it is cross entropy, it costs what cross entropy costs, without a short pass.

    Args:
        objective: The other one.
        start: Optimizer step with which it begins, counted from 0.
        warmup: Number of steps over which the weights go from 1 to the full ones.
        stop: Optimizer step from which on it is cross entropy again; null for never.
    """

    def __init__(
        self,
        objective: Objective,
        start: NonNegativeInt = 0,
        warmup: NonNegativeInt = 0,
        stop: NonNegativeInt | None = None,
    ) -> None:
        first = start + (warmup > 0)  # the warm-up begins with a weight of 1
        if stop is not None and stop <= first:
            raise ValueError(f"`stop` must be above {first}, or no step has weights, got {stop}.")
        super().__init__(objective)
        self.start, self.warmup, self.stop = start, warmup, stop

    def at_step(self, step: int) -> Objective:
        """Return cross entropy, a mean of it and the other objective, or the other objective."""
        if step < self.start or (self.stop is not None and step >= self.stop):
            return CrossEntropy()
        objective, passed = self.objective.at_step(step), step - self.start
        if passed >= self.warmup:
            return objective
        return Interpolated(objective, 1 - passed / self.warmup) if passed else CrossEntropy()
