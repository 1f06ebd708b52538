"""What the long context does for each token: the pure functions of a pair of log-likelihoods."""

import math

import torch
from torch import Tensor


def long_short_difference(long: Tensor, short: Tensor) -> Tensor:
    r"""How much likelier the long context makes each token (LSD), in nats.

    .. math:: \mathrm{LSD}(x_t) = \log P(x_t \mid \text{long context}) - \log P(x_t \mid \text{short context})

    Equation 2 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. Differentiable; the functions below are not.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` where there is none.

    Returns:
        ``[B, T]`` differences in nats, 0 for a token that has no short context.

    Example:
        >>> long_short_difference(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -4.0]))
        tensor([0., 3.])
    """
    return long - short


def key_token_mask(long: Tensor, short: Tensor, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    r"""Key tokens: the long context helps much, and with it the token is predicted well.

    .. math:: \mathrm{LSD}(x_t) > \alpha \ \text{and}\ \mathrm{LCL}(x_t) > \beta

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771; LCL is the long log-likelihood (Equation 3).

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` where there is none.
        alpha: Threshold of the long-short difference, in nats; 0 or more, or tokens without a long context would count.
        beta: Threshold of the long log-likelihood, in nats; below 0, or no token could count. ``-inf`` drops it.

    Returns:
        ``[B, T]`` bool.

    Raises:
        ValueError: If ``alpha`` is negative, ``beta`` is not, or either is not a number.

    Example:
        >>> key_token_mask(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -9.0]))
        tensor([False,  True, False])
    """
    if not alpha >= 0:
        raise ValueError(f"`alpha` must be 0 or more: a key token gains from the long context, got {alpha}.")
    if not beta < 0:
        raise ValueError(f"`beta` must be negative: it bounds a log-likelihood from below, got {beta}.")
    return (long_short_difference(long, short) > alpha) & (long > beta)


def soft_influence(long: Tensor, short: Tensor, *, gamma: float = 5.0) -> Tensor:
    r"""LongCE weight of a token: how many times likelier the long context makes it, capped.

    .. math:: I_t = \min\big(\exp(\ell_t^{long} - \ell_t^{short}),\ \gamma\big)

    Equation 7 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. It carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` where there is none.
        gamma: Largest weight; 1 or more, or a token that the long context helps would count for less.

    Returns:
        ``[B, T]`` weights in ``[0, gamma]``, 1 for a token that has no short context.

    Raises:
        ValueError: If ``gamma`` is below 1 or not finite.

    Example:
        >>> soft_influence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0]))
        tensor([1., 5.])
    """
    check_gamma(gamma)
    difference = long_short_difference(long.detach(), short.detach())
    # Not `exp(difference).clamp(max=gamma)`: it says the same, but lets rounding decide what is at the cap.
    return torch.where(difference >= math.log(gamma), gamma, difference.exp())


def check_gamma(gamma: float) -> None:
    """Refuse a largest weight that is below 1, infinite or not a number with a ``ValueError``."""
    if not 1 <= gamma < math.inf:
        raise ValueError(
            f"`gamma` caps weights that are 1 for an unhelped token, so it must be >= 1 and finite, got {gamma}."
        )
