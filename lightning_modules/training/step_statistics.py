"""Sums over the tokens of one optimizer step, from which its logged means come."""

import math
import time

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.objectives import Objective
from lightning_modules.training.sequence_parallel import sequence_group


class TrainingStatistics:
    """Means over all tokens of one optimizer step: of all its micro-batches and of all processes.

    If windows are ``drawn``, only some are scored: single weights mean nothing then, but their mean does. `compute`
    sets ``step_divisor``, the divisor of the step's loss: its scored tokens, or the sum of their weights for an
    objective that is normalized.
    """

    step_divisor: Tensor

    def __init__(self, objective: Objective, *, drawn: bool = False) -> None:
        self.objective = objective
        self.drawn = drawn
        self._sums: Tensor | None = None
        self._seconds = 0.0
        self._started: float | None = None

    def start_clock(self) -> None:
        """Count the time from now on, unless it is counted already."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop_clock(self) -> None:
        """Count no time until `start_clock`: an evaluation follows."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def update(self, loss: Tensor, long: Tensor, token_weights: Tensor, labels: Tensor, *, cap: float | None) -> None:
        """Add a batch, without waiting for the accelerator.

        The loss is a sum over tokens, in nats, as the ``long`` log-likelihoods are; ``cap`` is the largest weight at
        this step. All but the loss are ``[B, T]``.
        """
        scored = labels.ne(IGNORE_INDEX)
        weight = token_weights.double() * scored
        # In the weights' own precision: in float32 the weight at a cap of 1.3 is a little below 1.3.
        at_cap = token_weights >= torch.tensor(math.inf if cap is None else cap, dtype=token_weights.dtype)
        sums = [
            loss,
            -long.double().sum(),
            scored.sum(),
            weight.sum(),
            (weight > 1).sum(),
            (at_cap & scored).sum(),
            weight.square().sum(),
        ]
        batch = torch.stack([value.double() for value in sums])
        self._sums = batch if self._sums is None else self._sums + batch

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """Return float32 scalars by name; every process must call it."""
        assert self._sums is not None, "an optimizer step follows a training batch"
        group = sequence_group(strategy)
        # Processes that share sequences have all counted the whole of them.
        sums = strategy.reduce(self._sums, reduce_op="sum") / (1 if group is None else group.size)
        loss, nll, tokens, weights, above, capped, squares = sums.unbind()
        # Without any weight there is no gradient either, whatever it is divided by.
        self.step_divisor = weights.where(weights > 0, 1.0) if self.objective.normalized else tokens.clamp(min=1)
        self.stop_clock()
        values = {
            "loss": loss / self.step_divisor,
            "perplexity": torch.exp(nll / tokens),
            "tokens_per_second": tokens / self._seconds,
        }
        weighs = self.objective.uses_short_context or self.objective.uses_stored_influence
        if weighs:
            values["weight_mean"] = weights / tokens
        if weighs and not self.drawn:
            values["weight_above_1"] = above / tokens
            # Kish's effective sample size as a fraction: that many tokens of equal weight make a mean just as noisy.
            values["weight_effective_share"] = weights.square() / (squares * tokens).clamp(min=1e-300)
        if self.objective.largest_weight is not None and not self.drawn:
            values["weight_at_cap"] = capped / tokens
        return {name: value.float() for name, value in values.items()}

    def reset(self) -> None:
        """Begin the next optimizer step."""
        self._sums, self._seconds = None, 0.0
        self.start_clock()
