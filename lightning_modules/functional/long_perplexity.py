"""LongPPL: perplexity over key tokens (Equation 4)."""

import torch
from torch import Tensor

from lightning_modules.functional.checks import ROUNDING_TOLERANCE


def long_perplexity(log_likelihood: Tensor, influence: Tensor) -> Tensor:
    r"""Compute LongPPL: the exponential of the influence-weighted mean negative log-likelihood.

    .. math:: \mathrm{LongPPL} = \exp\Big(-\frac{\sum_t I_t \, \ell_t}{\sum_t I_t}\Big)

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The influence decides what is measured: the
    key tokens of an evaluator give LongPPL, its soft influence gives soft LongPPL, all scored tokens give perplexity.

    Args:
        log_likelihood: ``[..]`` log-likelihoods under the evaluated model in nats, 0 or less.
        influence: ``[..]`` bool or float weights of the same shape, 0 or more; 0 for tokens that are not scored.

    Returns:
        Scalar, float64; NaN unless the influences sum to more than 0.

    Raises:
        ValueError: If the shapes differ, or a token with influence has a log-likelihood above 0.

    Example:
        >>> long_perplexity(torch.tensor([0.5, 0.25, 0.125]).log(), torch.tensor([False, True, True]))
        tensor(5.6569, dtype=torch.float64)
    """
    return _long_perplexity_compute(*_long_perplexity_update(log_likelihood, influence))


def _long_perplexity_update(log_likelihood: Tensor, influence: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of log-likelihoods, the sum of weights and the largest log-likelihood, in float64."""
    if log_likelihood.shape != influence.shape:
        raise ValueError(
            "`log_likelihood` and `influence` must have the same shape,"
            f" got {list(log_likelihood.shape)} and {list(influence.shape)}."
        )
    weight = influence.detach().double()
    scores = log_likelihood.detach().double()
    has_weight = weight != 0
    # A token of weight 0 must not count even if its log-likelihood is -inf: 0 * inf is NaN.
    weighted = torch.where(has_weight, scores * weight, 0.0)
    # `amax` of an empty batch is an error, hence the extra element.
    largest = torch.cat(
        [torch.where(has_weight, scores, -torch.inf).flatten(), scores.new_full((1,), -torch.inf)]
    ).amax()
    return weighted.sum(), weight.sum(), largest


def _long_perplexity_compute(log_likelihood: Tensor, influence: Tensor, largest: Tensor) -> Tensor:
    """Return LongPPL from the sums of `_long_perplexity_update`."""
    # Checked here and not in each update, because reading a value makes the CPU wait for the GPU.
    if largest > ROUNDING_TOLERANCE:
        raise ValueError(
            f"A log-likelihood is {float(largest):.4g}, but must be 0 or less: pass log-likelihoods, not losses (a"
            " loss is the negative log-likelihood)."
        )
    # Weights that sum to 0 would give 0 or infinity, depending on the sign of the numerator.
    return torch.where(influence > 0, torch.exp(-log_likelihood / influence), torch.nan)
