"""Training objectives: token weights of the loss, computed from the long and short log-likelihoods."""

import copy
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import (
    ShortContext,
    mutual_information,
    soft_influence,
    threshold_weights,
    top_fraction_weights,
)
from lightning_modules.functional.checks import check_count, check_fraction
from lightning_modules.functional.influence import Part, check_gamma, check_part, check_threshold


class Objective(ABC):
    """Token weights of the loss `long_cross_entropy`.

    To define your own weighting, subclass this and implement one pure function, `token_weights`.
    """

    uses_short_context: bool = True
    """Whether `token_weights` uses ``short``; if not, the short pass is skipped."""

    pointwise: bool = True
    """Whether each weight depends on its own token only, so that short windows can be sampled."""

    uses_stored_influence: bool = False
    """Whether the batch contains the weights (`data.influence`)."""

    largest_weight: float | None = None
    """Cap of the weights, or None; the fraction of tokens at the cap is logged."""

    normalized: bool = False
    """Whether an optimizer step divides its loss by the sum of the weights, not by the number of scored tokens."""

    @abstractmethod
    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the ``[B, T]`` weight of each token; values at unscored tokens are ignored.

        Args:
            long: ``[B, T]`` log-likelihoods given everything before the token, in nats; 0 where it is not scored.
            short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
            batch: The batch, with whole sequences even if several processes share them.
        """

    def checked_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return `token_weights`, or raise a ``ValueError`` if they are not a ``[B, T]`` tensor."""
        weights = self.token_weights(long, short, batch)
        if not isinstance(weights, Tensor) or weights.shape != long.shape:  # it would be broadcast
            found = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"`token_weights` of {type(self).__name__} must return a tensor of the shape [B, T] ="
                f" {list(long.shape)}, got {found}."
            )
        return weights

    @torch.no_grad()
    def __call__(self, long: Tensor, short: ShortContext | None, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` token weights, 0 where a token is not scored.

        If only a random sample of the windows was scored, the weights are scaled up so that their expected value is
        right: ``1 + (I - 1) / fraction`` for LongCE. They can be negative.
        """
        # A token without a short context has equal log-likelihoods, and so a difference of 0.
        weights = self.checked_weights(long, long if short is None else short.fill_missing(long), batch)
        if short is not None and short.window_fraction < 1:
            # Scale the difference from the weight that a token has without a short context. Each window is drawn with
            # probability `window_fraction`, so the expected weight is that of all windows.
            without_short = self.checked_weights(long, long, batch)
            weights = without_short + (weights - without_short) / short.window_fraction
        return weights.to(long.dtype).masked_fill(batch["labels"].eq(IGNORE_INDEX), 0)

    def at_step(self, step: int) -> "Objective":
        """Return the objective to use in an optimizer step, counted from 0."""
        return self


class CrossEntropy(Objective):
    """Cross entropy: every token has weight 1 (Equation 5 of Fang et al., 2025)."""

    uses_short_context = False

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return ones."""
        return torch.ones_like(long)


class LongCE(Objective):
    """LongCE: weight each token by how many times likelier the long context makes it (Equations 6 and 7).

    Args:
        gamma: Largest token weight, 1 or more.
    """

    def __init__(self, gamma: float = 5.0) -> None:
        check_gamma(gamma)
        self.gamma = self.largest_weight = gamma  # `soft_influence` assigns this number exactly

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `soft_influence`, capped at ``gamma``."""
        return soft_influence(long, short, gamma=self.gamma)


class StoredInfluence(LongCE):
    """LongCE with weights that ``longce influence`` computed in advance, at the cost of cross entropy.

    The weights are those of a fixed evaluator; in LongCE they come from the trained model at every step.

    Args:
        gamma: Largest token weight, 1 or more; it also caps the stored weights.
    """

    uses_short_context = False
    uses_stored_influence = True

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the stored weights of the batch, capped at ``gamma``."""
        # Computed in advance with a cap of at least `gamma`, which the preflight checks.
        return batch["influence"].clamp(max=self.gamma)


class MutualInformation(Objective):
    """Weight each token by its mutual information with the far context (PPMI, NPMI, dense; Helm et al., 2025).

    The weights are scaled to a mean of 1 over all scored tokens of an optimizer step; if all are 0, the step has no
    gradient. The paper (https://arxiv.org/abs/2503.09202) scales them over each sequence: use ``Normalized`` with
    ``mean_over: sequence``. Its dense weights are ``part: absolute``, interpolated with cross entropy (`Interpolated`).

    Args:
        part: ``positive`` for tokens that the long context makes likelier, ``negative`` for tokens that it makes less
            likely, ``absolute`` for both.
        shift: How many times likelier one context must make a token than the other; above 0, and 1 for ``absolute``.
    """

    normalized = True

    def __init__(self, part: Part = "positive", shift: float = 1.0) -> None:
        check_part(part, shift)
        self.part: Part = part
        self.shift = shift

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `mutual_information`."""
        return mutual_information(long, short, part=self.part, shift=self.shift)


class Sparse(Objective):
    """Train only on tokens that the far context changes a lot: the sparse weights of Helm et al. (2025).

    They are scaled like those of `MutualInformation`. The paper selects a ``fraction`` of each sequence.

    Args:
        threshold: Smallest absolute difference of the log-likelihoods, in nats; 0 or more.
        fraction: Select this fraction of each sequence instead, the tokens with the largest differences.
    """

    normalized = True

    def __init__(self, threshold: float = 0.5, fraction: float | None = None) -> None:
        check_threshold(threshold)
        check_fraction("`fraction`", 1.0 if fraction is None else fraction)
        self.threshold, self.fraction, self.pointwise = threshold, fraction, fraction is None

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `threshold_weights` or `top_fraction_weights`."""
        # A threshold looks at each token alone, a fraction at its whole sequence (`pointwise`).
        if self.fraction is None:
            return threshold_weights(long, short, threshold=self.threshold)
        return top_fraction_weights(long, short, batch["labels"].ne(IGNORE_INDEX), fraction=self.fraction)


class Wrapper(Objective):
    """An objective around another one, from which it takes its properties by default."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.uses_short_context = objective.uses_short_context
        self.uses_stored_influence = objective.uses_stored_influence
        self.largest_weight = objective.largest_weight
        self.normalized = objective.normalized
        self.pointwise = objective.pointwise

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weights of the inner objective."""
        return self.objective.checked_weights(long, short, batch)

    def at_step(self, step: int) -> Objective:
        """Return this wrapper around the inner objective of the step."""
        inner = self.objective.at_step(step)
        if inner is self.objective:
            return self
        # A copy: the objective itself is the same in all steps.
        wrapper = copy.copy(self)
        wrapper.objective = inner
        wrapper.uses_short_context = inner.uses_short_context
        if self.largest_weight is not None:
            wrapper.largest_weight = inner.largest_weight
        return wrapper


def unwrap(objective: Objective) -> Objective:
    """Return the objective inside all wrappers."""
    while isinstance(objective, Wrapper):
        objective = objective.objective
    return objective


class Normalized(Wrapper):
    """Weights of another objective, scaled to a mean of 1.

    Args:
        objective: The objective whose weights are scaled.
        mean_over: ``step``: over all scored tokens of all batches and processes of an optimizer step; the log shows
            the weights before scaling. ``sequence``: over each training sequence separately, as in Helm et al. (2025);
            a sequence whose weights are all 0 gets weights of 1.
    """

    def __init__(self, objective: Objective, mean_over: Literal["step", "sequence"] = "step") -> None:
        super().__init__(objective)
        self.mean_over = mean_over
        self.normalized = mean_over == "step"
        # A mean over a sequence needs all of its tokens, and scales the cap differently in each.
        if not self.normalized:
            self.pointwise, self.largest_weight = False, None

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weights, scaled over each sequence; for a mean over a step, the step's divisor does it."""
        weights = self.objective.checked_weights(long, short, batch)
        if self.normalized:
            return weights
        # Multiply by the number of scored tokens over the sum of their weights ([B, 1]): the mean becomes 1.
        scored = batch["labels"].ne(IGNORE_INDEX)
        total = weights.masked_fill(~scored, 0).sum(-1, keepdim=True)
        return torch.where(total > 0, weights * scored.sum(-1, keepdim=True) / total, 1.0)


class Interpolated(Wrapper):
    r"""Weighted mean of cross entropy and another objective.

    .. math:: w_t = \lambda + (1 - \lambda) I_t

    Weights that are normalized over an optimizer step are interpolated before that. Helm et al. (2025) normalize each
    sequence first: to do the same, interpolate a ``Normalized`` objective with ``mean_over: sequence``.

    Args:
        objective: The other objective.
        cross_entropy_share: Fraction of cross entropy, from 0 to 1.
    """

    def __init__(self, objective: Objective, cross_entropy_share: float = 0.5) -> None:
        if not 0 <= cross_entropy_share <= 1:
            raise ValueError(f"`cross_entropy_share` must be from 0 to 1, got {cross_entropy_share}.")
        super().__init__(objective)
        self.cross_entropy_share = cross_entropy_share
        if objective.largest_weight is not None:
            self.largest_weight = cross_entropy_share + (1 - cross_entropy_share) * objective.largest_weight

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weighted mean of 1 and the other objective's weights."""
        other, cap = self.objective.checked_weights(long, short, batch), self.objective.largest_weight
        weight = self.cross_entropy_share + (1 - self.cross_entropy_share) * other
        if cap is None or self.largest_weight is None:
            return weight
        # Assign the cap exactly: rounding must not decide which weights are at it.
        return torch.where(other >= torch.tensor(cap, dtype=other.dtype), self.largest_weight, weight)

    def at_step(self, step: int) -> Objective:
        """Return the interpolation with the other objective of the step."""
        # A new one rather than a copy: its cap follows from that of the other objective.
        return Interpolated(self.objective.at_step(step), self.cross_entropy_share)


class Scheduled(Wrapper):
    """Another objective between two optimizer steps, with a warm-up of its weights; cross entropy before and after.

    The steps with cross entropy need no short pass.

    Args:
        objective: The objective between the two steps.
        start: First optimizer step with the objective, counted from 0.
        warmup: Number of steps over which the weights go from 1 to their full value.
        stop: First optimizer step with cross entropy again, or null to keep the objective.
    """

    def __init__(self, objective: Objective, start: int = 0, warmup: int = 0, stop: int | None = None) -> None:
        for name, value in (("start", start), ("warmup", warmup)):
            check_count(f"`{name}`", value, minimum=0)
        first = start + (warmup > 0)  # in the first step of a warm-up, all weights are still 1
        if stop is not None and stop <= first:
            raise ValueError(f"`stop` must be above {first}, or no step would use the objective, got {stop}.")
        super().__init__(objective)
        self.start, self.warmup, self.stop = start, warmup, stop

    def at_step(self, step: int) -> Objective:
        """Return cross entropy, the objective, or an interpolation of both during the warm-up."""
        if step < self.start or (self.stop is not None and step >= self.stop):
            return CrossEntropy()
        # Step k of a warm-up of n steps has k / n of the weights, so step 0 has none and needs no short pass.
        objective, passed = self.objective.at_step(step), step - self.start
        if passed >= self.warmup:
            return objective
        return Interpolated(objective, 1 - passed / self.warmup) if passed else CrossEntropy()
