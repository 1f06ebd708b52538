"""LongCE, the training loss (Equation 6)."""

from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX


def long_cross_entropy(
    log_likelihood: Tensor, token_weights: Tensor, labels: Tensor, *, divisor: float | Tensor | None = None
) -> Tensor:
    r"""Compute LongCE: the mean over scored tokens of their negative log-likelihood times their weight.

    .. math:: \mathrm{LongCE} = -\frac{1}{n} \sum_{t=1}^{n} I_t \, \ell_t

    Equation 6 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The mean divides by the number of scored
    tokens, not by the sum of the weights. With weights of 1 it is the ordinary cross entropy (Equation 5).

    Args:
        log_likelihood: ``[B, T]`` log-likelihoods in nats; gradients flow through these.
        token_weights: ``[B, T]`` weights; gradients do not flow through these.
        labels: ``[B, T]`` int64, ``IGNORE_INDEX`` where a token is not scored.
        divisor: Divide the sum by this constant instead of the number of scored tokens. Training does so, because the
            number is not known before the last batch of an optimizer step.

    Returns:
        Scalar loss in nats per scored token, or with ``divisor`` in nats divided by it; 0 when no token is scored.

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> import torch
        >>> log_likelihood, labels = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[IGNORE_INDEX, 7, 8]])
        >>> long_cross_entropy(log_likelihood, torch.tensor([[1.0, 1.0, 5.0]]), labels)
        tensor(5.5000)
    """
    if not log_likelihood.shape == token_weights.shape == labels.shape:
        raise ValueError(
            "`log_likelihood`, `token_weights` and `labels` must have the same shape [B, T],"
            f" got {list(log_likelihood.shape)}, {list(token_weights.shape)} and {list(labels.shape)}."
        )
    scored = labels.ne(IGNORE_INDEX)
    # Mask both factors: NaN in one of them at an unscored token would reach the gradient through the product.
    log_likelihood = log_likelihood.masked_fill(~scored, 0)
    token_weights = token_weights.detach().masked_fill(~scored, 0)
    total = -(log_likelihood * token_weights).sum()
    return total / (scored.sum().clamp(min=1) if divisor is None else divisor)
