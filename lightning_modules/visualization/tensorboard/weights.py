"""A sample of the token weights of a training step, small enough to be kept."""

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX

SAMPLED = 4096
"""Tokens of a batch that are looked at, at most."""


class WeightSample:
    """Weights and long-short differences of tokens of one optimizer step, in main memory.

    The draw has a generator of its own: training draws the same random numbers with it and without.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._weights: list[Tensor] = []
        self._differences: list[Tensor] = []

    def __len__(self) -> int:
        """Batches drawn from since the last `take`."""
        return len(self._weights)

    def add(
        self,
        long: Tensor,
        influence: Tensor,
        labels: Tensor,
        short: Tensor | None = None,
        differs: Tensor | None = None,
    ) -> None:
        """Draw up to 4096 tokens of a batch; one copy of them waits for the accelerator.

        Args:
            long: ``[B, T]`` log-likelihoods in nats.
            influence: ``[B, T]`` weights.
            labels: ``[B, T]``, ``IGNORE_INDEX`` where a token is not scored.
            short: ``[B, T]`` short log-likelihoods in nats; None if the weights do not follow from them.
            differs: ``[B, T]`` bool, where there are any.
        """
        drawn: Tensor | slice = slice(None)
        if labels.numel() > SAMPLED:
            drawn = torch.randint(labels.numel(), (SAMPLED,), generator=self._generator).to(labels.device)
        if short is None or differs is None:
            short, differs = long, torch.zeros_like(labels, dtype=torch.bool)
        parts = (influence, labels.ne(IGNORE_INDEX), long, short, differs)
        weight, scored, long, short, differs = torch.stack([p.detach().flatten()[drawn].double() for p in parts]).cpu()
        self._weights.append(weight[scored > 0])
        self._differences.append((long - short)[(scored * differs) > 0])

    def take(self) -> tuple[Tensor, Tensor]:
        """``[N]`` weights and ``[M]`` long-short differences in nats of the tokens drawn since the last call."""
        empty = torch.zeros(0, dtype=torch.float64)
        taken = torch.cat([empty, *self._weights]), torch.cat([empty, *self._differences])
        self._weights, self._differences = [], []
        return taken
