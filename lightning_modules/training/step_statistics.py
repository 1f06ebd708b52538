"""Sums over the tokens of one optimizer step, from which its logged means come."""

import math
import time

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.objectives import Objective


class TrainingStatistics:
    """Means over all tokens of one optimizer step: of all its micro-batches and of all processes.

    Args:
        objective: Decides which statistics of the weights exist.
        drawn: Whether only some windows are scored, so that single weights mean nothing, but their mean does.

    Attributes:
        batch_tokens: Scored tokens of the last batch, float64; a tensor, for which nothing waits.
        step_divisor: What the loss of the step that `compute` was last called for is divided by: its scored tokens, or
            the sum of their weights for an objective that is normalised.
    """

    batch_tokens: Tensor
    step_divisor: Tensor

    def __init__(self, objective: Objective, *, drawn: bool = False) -> None:
        self.objective = objective
        self.drawn = drawn
        self._sums: Tensor | None = None
        self._seconds = 0.0
        self._started: float | None = None

    def start_clock(self) -> None:
        """Training goes on; the time since the last batch counts unless `stop_clock` came between."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop_clock(self) -> None:
        """What follows (an evaluation) is not training time."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def update(self, long: Tensor, influence: Tensor, labels: Tensor, *, cap: float | None) -> None:
        """Add a batch; nothing waits for the accelerator.

        Args:
            long: ``[B, T]`` log-likelihoods in nats.
            influence: ``[B, T]`` weights.
            labels: ``[B, T]``, ``IGNORE_INDEX`` where a token is not scored.
            cap: Largest weight at this step; None without one.
        """
        scored = labels.ne(IGNORE_INDEX)
        weight = influence.double() * scored
        # In the weights' own precision: in float32 the weight at a cap of 1.3 is a little below 1.3.
        at_cap = influence >= torch.tensor(math.inf if cap is None else cap, dtype=influence.dtype)
        sums = [
            -(long.double() * weight).sum(),
            -long.double().sum(),
            scored.sum(),
            weight.sum(),
            (weight > 1).sum(),
            (at_cap & scored).sum(),
            weight.square().sum(),
        ]
        batch = torch.stack([value.double() for value in sums])
        self.batch_tokens = batch[2]
        self._sums = batch if self._sums is None else self._sums + batch

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """Float32 scalars by name; every process must call it."""
        if self._sums is None:
            raise RuntimeError("An optimizer step without a training batch before it has no statistics.")
        loss, nll, tokens, weights, above, capped, squares = strategy.reduce(self._sums, reduce_op="sum").unbind()
        # Without any weight there is no gradient either, whatever it is divided by.
        self.step_divisor = weights.where(weights > 0, 1.0) if self.objective.normalised else tokens.clamp(min=1)
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
            # Kish's effective sample size, as a share: so many tokens of equal weight make a mean as noisy.
            values["weight_effective_share"] = weights.square() / (squares * tokens).clamp(min=1e-300)
        if self.objective.largest_weight is not None and not self.drawn:
            values["weight_at_cap"] = capped / tokens
        return {name: value.float() for name, value in values.items()}

    def reset(self) -> None:
        """Begin the next optimizer step."""
        self._sums, self._seconds = None, 0.0
        self.start_clock()
