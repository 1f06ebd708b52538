"""Perplexity over the tokens that matter."""

import torch
from torch import Tensor


def long_perplexity(log_likelihood: Tensor, influence: Tensor) -> Tensor:
    r"""LongPPL: exponential of the influence-weighted mean negative log-likelihood.

    .. math:: \mathrm{LongPPL} = \exp\Big(-\frac{\sum_t I_t \, \ell_t}{\sum_t I_t}\Big)

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The influence decides what it measures: the
    key tokens of an evaluator give LongPPL, its soft influence gives soft LongPPL, all scored tokens give perplexity.

    Args:
        log_likelihood: ``[..]`` log-likelihoods in nats, under the evaluated model.
        influence: ``[..]`` bool or float weights of the same shape, 0 or more; 0 for tokens that are not scored.

    Returns:
        float64 scalar; NaN when the influences sum to 0.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> long_perplexity(torch.tensor([0.5, 0.25, 0.125]).log(), torch.tensor([False, True, True]))
        tensor(5.6569, dtype=torch.float64)
    """
    return _long_perplexity_compute(*_long_perplexity_update(log_likelihood, influence))


def _long_perplexity_update(log_likelihood: Tensor, influence: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weighted log-likelihoods and sum of weights, both float64."""
    if log_likelihood.shape != influence.shape:
        raise ValueError(
            "`log_likelihood` and `influence` must have one shape,"
            f" got {list(log_likelihood.shape)} and {list(influence.shape)}."
        )
    weight = influence.detach().double()
    # A token of weight 0 must not matter even if its log-likelihood is -inf: 0 * inf is NaN.
    weighted = torch.where(weight != 0, log_likelihood.detach().double() * weight, 0.0)
    return weighted.sum(), weight.sum()


def _long_perplexity_compute(log_likelihood: Tensor, influence: Tensor) -> Tensor:
    return torch.exp(-log_likelihood / influence)
