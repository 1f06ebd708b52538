"""Sums over the tokens of many documents by position, and samples of training tokens."""

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, MAX_SEQUENCE_LENGTH
from lightning_modules.functional import PowerLaw, ShortScores, fit_power_law

SHORTEST_FITTED = 16  # tokens of context to which a power law is fitted: shorter ones are within a sentence
SAMPLED = 4096  # most tokens of a batch in a sample


class PositionSums:
    """Means of per-token values by the position of the token in its document, in bins of half an octave.

    ``sums`` is ``[2 + values, bins]`` float64: numbers of tokens, and sums of their positions and values.
    """

    def __init__(self, values: int) -> None:
        edges = torch.tensor(
            [2.0 ** (half / 2) for half in range(2 * MAX_SEQUENCE_LENGTH.bit_length())], dtype=torch.float64
        )
        self._edges = edges.ceil().long().unique()  # [1, 2, 3, 4, 6, 8, 12, ..]
        self.sums = torch.zeros(2 + values, len(self._edges), dtype=torch.float64)

    def add(self, positions: Tensor, *values: Tensor) -> None:
        """Add ``[N]`` values of tokens at ``[N]`` int64 positions of 1 or more."""
        bins = torch.bucketize(positions, self._edges, right=True) - 1
        for total, value in zip(self.sums, (torch.ones_like(positions), positions, *values), strict=True):
            total += torch.bincount(bins, weights=value.double(), minlength=len(total))

    def means(self) -> Tensor:
        """Return ``[1 + values, n]`` float64 mean position and values of the bins that have tokens."""
        sums = self.sums[:, self.sums[0] > 0]
        return sums[1:] / sums[0]

    def fit(self) -> PowerLaw | None:
        """Fit a power law of the loss, the first value, to contexts of 16 tokens or more; None if undetermined."""
        means = self.means()
        fitted = means[:, means[0] >= SHORTEST_FITTED]
        if fitted.shape[1] < 3 or not fitted[1].isfinite().all():
            return None
        fit = fit_power_law(fitted[0], fitted[1])
        if not fit.is_determined:
            return None
        return fit


class WeightSample:
    """Weights and long-short differences of tokens of one optimizer step, in main memory."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._differences: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of batches since the last `take`."""
        return len(self._weights)

    def add(self, long: Tensor, token_weights: Tensor, short: ShortScores | None, labels: Tensor) -> None:
        """Take every n-th token of a batch of ``[B, T]`` tensors, up to 4096; one copy waits for the accelerator.

        Tokens without a short context have weights only.
        """
        if short is None:
            short = ShortScores(long, torch.zeros_like(labels, dtype=torch.bool))
        every = -(-labels.numel() // SAMPLED)
        parts = (token_weights, labels.ne(IGNORE_INDEX), long, short.log_likelihood, short.has_short_context)
        sampled = torch.stack([part.detach().flatten()[::every].double() for part in parts]).cpu()
        weight, scored, long_sampled, short_sampled, compared = sampled
        self._weights.append(weight[scored > 0])
        self._differences.append((long_sampled - short_sampled)[(scored * compared) > 0])

    def take(self) -> tuple[Tensor, Tensor]:
        """Return ``[N]`` weights and ``[M]`` long-short differences in nats since the last call."""
        empty = torch.zeros(0, dtype=torch.float64)
        taken = torch.cat([empty, *self._weights]), torch.cat([empty, *self._differences])
        self._weights = []
        self._differences = []
        return taken
