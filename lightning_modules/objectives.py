"""Training objectives: token weights of the loss, computed from the long and short log-likelihoods."""

import copy
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import (
    ShortScores,
    excess_loss_weights,
    mutual_information,
    scale_to_mean_one,
    soft_influence,
    threshold_weights,
    top_fraction_weights,
)
from lightning_modules.functional.checks import check_count, check_fraction
from lightning_modules.functional.equations import check_gamma
from lightning_modules.functional.token_weights import Part, check_part, check_threshold


class Objective(ABC):
    """Token weights of the loss `long_cross_entropy`.

    To define your own weighting, subclass this and implement one pure function, `token_weights`.
    """

    uses_short_context: bool = True
    """Whether `token_weights` uses ``short``; if not, the short pass is skipped."""

    uses_stored: Literal["weights", "reference losses"] | None = None
    """What ``longce influence`` stored for each token, which the batch has as ``influence`` (`data.influence`)."""

    largest_weight: float | None = None
    """Cap of the weights, or None; the fraction of tokens at the cap is logged."""

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
    def __call__(self, long: Tensor, short: ShortScores | None, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` token weights, 0 where a token is not scored."""
        # A token without a short context has equal log-likelihoods, and so a difference of 0.
        weights = self.checked_weights(long, long if short is None else short.fill_missing(long), batch)
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
    uses_stored = "weights"

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the stored weights of the batch, capped at ``gamma``."""
        # Computed in advance with a cap of at least `gamma`, which the preflight checks.
        return batch["influence"].clamp(max=self.gamma)


class MutualInformation(Objective):
    """Weight each token by its mutual information with the far context (PPMI, NPMI, dense; Helm et al., 2025).

    As in the paper (https://arxiv.org/abs/2503.09202), the weights of each sequence are scaled to a mean of 1
    (`scale_to_mean_one`). Its dense weights are ``part: absolute``, interpolated with cross entropy (`Interpolated`).

    Args:
        part: ``positive`` for tokens that the long context makes likelier, ``negative`` for tokens that it makes less
            likely, ``absolute`` for both.
        shift: How many times likelier one context must make a token than the other; above 0, and 1 for ``absolute``.
    """

    def __init__(self, part: Part = "positive", shift: float = 1.0) -> None:
        check_part(part, shift)
        self.part: Part = part
        self.shift = shift

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `mutual_information`, scaled over each sequence."""
        weights = mutual_information(long, short, part=self.part, shift=self.shift)
        return scale_to_mean_one(weights, batch["labels"].ne(IGNORE_INDEX))


class Sparse(Objective):
    """Train only on tokens that the far context changes a lot: the sparse weights of Helm et al. (2025).

    They are scaled like those of `MutualInformation`: the selected tokens of a sequence have equal weights with a mean
    of 1 over all its tokens. The paper selects a ``fraction`` of each sequence.

    Args:
        threshold: Smallest absolute difference of the log-likelihoods, in nats; 0 or more.
        fraction: Select this fraction of each sequence instead, the tokens with the largest differences.
    """

    def __init__(self, threshold: float = 0.5, fraction: float | None = None) -> None:
        check_threshold(threshold)
        check_fraction("`fraction`", 1.0 if fraction is None else fraction)
        self.threshold = threshold
        self.fraction = fraction

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `threshold_weights` or `top_fraction_weights`, scaled over each sequence."""
        scored = batch["labels"].ne(IGNORE_INDEX)
        if self.fraction is None:
            weights = threshold_weights(long, short, threshold=self.threshold)
        else:
            weights = top_fraction_weights(long, short, scored, fraction=self.fraction)
        return scale_to_mean_one(weights, scored)


class Rho1(Objective):
    """Train only on tokens whose loss is furthest above that of a reference model (selective language modeling).

    As in Lin et al. (2024), https://arxiv.org/abs/2404.07965, the loss is the mean over the selected tokens. They are
    selected in each sequence, so that the number of sequences in a batch and of processes does not matter. ``longce
    influence`` computes the losses of the reference model in advance.

    Args:
        fraction: Fraction of the tokens of each sequence to train on, above 0 and at most 1.
    """

    uses_short_context = False
    uses_stored = "reference losses"

    def __init__(self, fraction: float = 0.6) -> None:
        check_fraction("`fraction`", fraction)
        self.fraction = fraction

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the `excess_loss_weights`, scaled over each sequence."""
        scored = batch["labels"].ne(IGNORE_INDEX)
        weights = excess_loss_weights(long, batch["influence"], scored, fraction=self.fraction)
        return scale_to_mean_one(weights, scored)


class Wrapper(Objective):
    """An objective around another one, from which it takes its properties by default."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.uses_short_context = objective.uses_short_context
        self.uses_stored = objective.uses_stored
        self.largest_weight = objective.largest_weight

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
    """Weights of another objective, scaled to a mean of 1 over each training sequence, as in Helm et al. (2025).

    Args:
        objective: The objective whose weights are scaled.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self.largest_weight = None  # the cap is scaled differently in each sequence

    def token_weights(self, long: Tensor, short: Tensor, batch: PackedBatch) -> Tensor:
        """Return the weights of the inner objective, scaled over each sequence."""
        weights = self.objective.checked_weights(long, short, batch)
        return scale_to_mean_one(weights, batch["labels"].ne(IGNORE_INDEX))


class Interpolated(Wrapper):
    r"""Weighted mean of cross entropy and another objective.

    .. math:: w_t = \lambda + (1 - \lambda) I_t

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
        other = self.objective.checked_weights(long, short, batch)
        cap = self.objective.largest_weight
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
        self.start = start
        self.warmup = warmup
        self.stop = stop

    def at_step(self, step: int) -> Objective:
        """Return cross entropy, the objective, or an interpolation of both during the warm-up."""
        if step < self.start or (self.stop is not None and step >= self.stop):
            return CrossEntropy()
        # Step k of a warm-up of n steps uses k / n of the weights, so step 0 does not need a short pass.
        objective = self.objective.at_step(step)
        passed = step - self.start
        if passed >= self.warmup:
            return objective
        return Interpolated(objective, 1 - passed / self.warmup) if passed else CrossEntropy()


def find_step_dependent(objective: Objective) -> Objective | None:
    """Return the objective, possibly inside wrappers, that changes with the optimizer step; None if none does."""
    constant = (Objective.at_step, Wrapper.at_step, Interpolated.at_step)  # these depend on the inner objective only
    while type(objective).at_step in constant:
        if not isinstance(objective, Wrapper):
            return None
        objective = objective.objective
    return objective
