"""Sums over the tokens of many documents, of which none has to be kept."""

import torch
from torch import Tensor

from lightning_modules.batch import LONGEST_ROW
from lightning_modules.functional import PowerLaw, fit_power_law

LSD_EDGES = torch.linspace(-6.0, 10.0, 81)
LCL_EDGES = torch.linspace(-12.0, 0.0, 61)
SHORTEST_FITTED = 16
"""Context from which on a power law is fitted, in tokens: sentences end before, and what they say is another matter."""


class BenefitCounts:
    """How many tokens have which long-short difference and long log-likelihood (LSD and LCL).

    Attributes:
        counts: ``[60, 80]`` float64 by LCL and LSD, in bins of 0.2 nats; tokens beyond the edges are in the outer bins.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(len(LCL_EDGES) - 1, len(LSD_EDGES) - 1, dtype=torch.float64)

    def add(self, long: Tensor, short: Tensor) -> None:
        """Count the tokens that have a short context.

        Args:
            long: ``[N]`` log-likelihoods in nats.
            short: ``[N]``, equal to ``long`` where there is no short context.
        """
        compared = long != short
        rows = _bins(long[compared], LCL_EDGES)
        columns = _bins((long - short)[compared], LSD_EDGES)
        width = self.counts.shape[1]
        found = torch.bincount(rows * width + columns, minlength=self.counts.numel())
        self.counts += found.reshape(self.counts.shape)


class PositionSums:
    """Means of per-token values by the position of the token in its document, in bins of half an octave.

    Args:
        values: How many values each token has.

    Attributes:
        sums: ``[2 + values, bins]`` float64: tokens, their positions, and their values, summed up.
    """

    def __init__(self, values: int) -> None:
        edges = torch.tensor([2.0 ** (half / 2) for half in range(2 * LONGEST_ROW.bit_length())], dtype=torch.float64)
        self._edges = edges.ceil().long().unique()  # [1, 2, 3, 4, 6, 8, 12, ..]
        self.sums = torch.zeros(2 + values, len(self._edges), dtype=torch.float64)

    def add(self, positions: Tensor, *values: Tensor) -> None:
        """Add tokens.

        Args:
            positions: ``[N]`` int64, tokens that stand before each, 1 or more.
            values: ``[N]`` each.
        """
        bins = torch.bucketize(positions, self._edges, right=True) - 1
        for total, value in zip(self.sums, (torch.ones_like(positions), positions, *values), strict=True):
            total += torch.bincount(bins, weights=value.double(), minlength=len(total))

    def means(self) -> Tensor:
        """``[1 + values, n]`` float64 mean position and values of the bins that have tokens."""
        count, *totals = self.sums[:, self.sums[0] > 0]
        return torch.stack([total / count for total in totals])

    def fit(self, value: int = 0) -> PowerLaw | None:
        """The power law that one of the values, a loss in nats, follows with the context.

        Returns:
            The curve over contexts of 16 tokens or more; None if they are in fewer than three bins.
        """
        means = self.means()
        fitted = means[:, means[0] >= SHORTEST_FITTED]
        if fitted.shape[1] < 3 or not fitted[1 + value].isfinite().all():
            return None
        return fit_power_law(fitted[0], fitted[1 + value])


def _bins(values: Tensor, edges: Tensor) -> Tensor:
    return (torch.bucketize(values.float(), edges, right=True) - 1).clamp(0, len(edges) - 2)
