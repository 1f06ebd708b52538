"""Perplexity over the tokens that matter, as a torchmetrics class."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modules.functional.long_perplexity import _long_perplexity_compute, _long_perplexity_update


class LongPerplexity(Metric):
    """Corpus LongPPL: sums over batches and processes, one exponential at the end.

    The influence given to `update` decides what it measures: the key tokens of an evaluator give LongPPL, its soft
    influence gives soft LongPPL, the mask of all scored tokens gives ordinary perplexity. The average is over tokens,
    not over documents (Equation 4 of Fang et al., 2025, https://arxiv.org/abs/2410.23771, for a corpus). NaN while
    the influences sum to 0.

    Example:
        >>> metric = LongPerplexity()
        >>> metric.update(torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[False, True]]))
        >>> metric.update(torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[True, False]]))
        >>> round(float(metric.compute()), 4)
        4.0
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 1.0

    log_likelihood: Tensor
    influence: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("log_likelihood", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("influence", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, log_likelihood: Tensor, influence: Tensor) -> None:
        """Add log-likelihoods (nats, any shape) and influences of the same shape."""
        total, weight = _long_perplexity_update(log_likelihood, influence)
        self.log_likelihood += total
        self.influence += weight

    def compute(self) -> Tensor:
        """LongPPL of everything seen since the last reset, float64."""
        return _long_perplexity_compute(self.log_likelihood, self.influence)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plot one value or several of them, by default the present one, as every torchmetrics metric does.

        Args:
            val: Results of `compute` or `forward`.
            ax: Matplotlib axes to draw on.

        Returns:
            Figure and axes.
        """
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> "LongPerplexity":
        """Move with the module but stay float64: `precision: bf16-true` would sum in bfloat16."""
        log_likelihood, influence = self.log_likelihood, self.influence
        super()._apply(fn, exclude_state)
        device = self.log_likelihood.device
        self.log_likelihood, self.influence = log_likelihood.to(device), influence.to(device)
        self._defaults = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self._defaults}
        return self
