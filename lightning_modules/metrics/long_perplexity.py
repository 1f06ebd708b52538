"""LongPPL as a torchmetrics class."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modules.functional.equations import _long_perplexity_compute, _long_perplexity_update


class LongPerplexity(Metric):
    """Corpus LongPPL: sums over batches and processes, one exponential at the end.

    The influence passed to `update` determines the metric: the key tokens of an evaluator give LongPPL, its soft
    influence gives soft LongPPL, the mask of all scored tokens gives ordinary perplexity. The mean is over tokens, not
    over documents (Equation 4 of Fang et al., 2025, https://arxiv.org/abs/2410.23771, for a corpus). It is NaN unless
    the influences sum to more than 0.

    Log-likelihoods above 0, such as losses passed by mistake, raise an error in `compute`. `update` only keeps the
    largest one, so that no batch waits for the GPU.

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
    largest: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Float64: float32 stops counting single tokens at 2**24.
        self.add_state("log_likelihood", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("influence", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-torch.inf, dtype=torch.float64), dist_reduce_fx="max")

    def update(self, log_likelihood: Tensor, influence: Tensor) -> None:
        """Add a batch of log-likelihoods in nats, of any shape, and influences of the same shape."""
        total, weight, largest = _long_perplexity_update(log_likelihood, influence)
        self.log_likelihood += total
        self.influence += weight
        self.largest = torch.maximum(self.largest, largest)

    def compute(self) -> Tensor:
        """Return LongPPL of everything seen since the last reset, float64.

        Raises:
            ValueError: If a token with influence has a log-likelihood above 0.
        """
        return _long_perplexity_compute(self.log_likelihood, self.influence, self.largest)

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Plot one or several values, by default the current one, like every torchmetrics metric."""
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> "LongPerplexity":
        """Move with the module but stay float64: `precision: bf16-true` would sum in bfloat16."""
        # Kept aside before the base class casts them.
        sums = {name: getattr(self, name) for name in self._defaults}
        super()._apply(fn, exclude_state)
        for name, value in sums.items():
            setattr(self, name, value.to(self.log_likelihood.device))
            default = self._defaults[name]
            assert isinstance(default, Tensor)
            self._defaults[name] = default.to(self.log_likelihood.device, torch.float64)
        return self
