"""The training loss."""

from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX


def long_cross_entropy(
    log_likelihood: Tensor, token_weights: Tensor, labels: Tensor, *, divisor: float | None = None
) -> Tensor:
    r"""Compute LongCE: the mean over scored tokens of their negative log-likelihood times their weight.

    .. math:: \mathrm{LongCE} = -\frac{1}{n} \sum_{t=1}^{n} I_t \, \ell_t

    Equation 6 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The mean divides by the number of scored
    tokens, not by the sum of the weights. With weights of 1 it is the ordinary cross entropy (Equation 5).

    Args:
        log_likelihood: ``[B, T]`` log-likelihoods in nats; gradients flow through these.
        token_weights: ``[B, T]`` weights; gradients do not flow through these.
        labels: ``[B, T]`` int64, ``IGNORE_INDEX`` where a token is not scored.
        divisor: Divide the sum by this constant instead of the number of scored tokens. Training does so, because that
            number is known only when all batches and processes of an optimizer step are.

    Returns:
        Scalar loss in nats per scored token; 0 when no token is scored.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> import torch
        >>> log_likelihood, labels = torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[IGNORE_INDEX, 7, 8]])
        >>> long_cross_entropy(log_likelihood, torch.tensor([[1.0, 1.0, 5.0]]), labels)
        tensor(5.5000)
    """
    if not log_likelihood.shape == token_weights.shape == labels.shape:
        raise ValueError(
            "`log_likelihood`, `token_weights` and `labels` must have one shape [B, T],"
            f" got {list(log_likelihood.shape)}, {list(token_weights.shape)} and {list(labels.shape)}."
        )
    scored = labels.ne(IGNORE_INDEX)
    # Both, or NaN in the one of a token that is not scored would be in the gradient of the other.
    log_likelihood, token_weights = (part.masked_fill(~scored, 0) for part in (log_likelihood, token_weights.detach()))
    total = -(log_likelihood * token_weights).sum()
    return total / (scored.sum().clamp(min=1) if divisor is None else divisor)
