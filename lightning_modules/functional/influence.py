"""Effect of the long context on each token: pure functions of the pair of log-likelihoods."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_modules.functional.checks import check_pair

Part = Literal["positive", "negative", "absolute"]
"""Which tokens a mutual information weighs: those that the long context helps, those that it harms, or both."""


def long_short_difference(long: Tensor, short: Tensor) -> Tensor:
    r"""How much likelier the long context makes each token (LSD), in nats.

    .. math:: \mathrm{LSD}(x_t) = \log P(x_t \mid \text{long context}) - \log P(x_t \mid \text{short context})

    Equation 2 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. Differentiable; the functions below are not.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.

    Returns:
        ``[B, T]`` differences in nats, 0 for a token that has no short context; NaN where both are ``-inf``.

    Raises:
        ValueError: If shapes disagree, or either is not of floating point.

    Example:
        >>> long_short_difference(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -4.0]))
        tensor([0., 3.])
    """
    check_pair(long, short)
    return long - short


def key_token_mask(long: Tensor, short: Tensor, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    r"""Key tokens: the long context helps much, and with it the token is predicted well.

    .. math:: \mathrm{LSD}(x_t) > \alpha \ \text{and}\ \mathrm{LCL}(x_t) > \beta

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771; LCL is the long log-likelihood (Equation 3).

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        alpha: Threshold of the long-short difference, in nats; 0 or more, or tokens without a long context would count.
        beta: Threshold of the long log-likelihood, in nats; below 0, or no token could count. ``-inf`` drops it.

    Returns:
        ``[B, T]`` bool.

    Raises:
        ValueError: If ``alpha`` is negative or infinite, ``beta`` is not negative, or either is not a number, or shapes
            disagree.

    Example:
        >>> key_token_mask(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -9.0]))
        tensor([False,  True, False])
    """
    check_thresholds(alpha, beta)
    return (long_short_difference(long, short) > alpha) & (long > beta)


def check_thresholds(alpha: float, beta: float) -> None:
    """Refuse thresholds of key tokens that no or meaningless tokens could pass with a ``ValueError``."""
    if not 0 <= alpha < math.inf:
        raise ValueError(f"`alpha` must be 0 or more and finite: a key token gains from the long context, got {alpha}.")
    if not beta < 0:
        raise ValueError(f"`beta` must be negative: it bounds a log-likelihood from below, got {beta}.")


def soft_influence(long: Tensor, short: Tensor, *, gamma: float = 5.0) -> Tensor:
    r"""LongCE weight of a token: how many times likelier the long context makes it, capped.

    .. math:: I_t = \min\big(\exp(\ell_t^{long} - \ell_t^{short}),\ \gamma\big)

    Equation 7 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. It carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        gamma: Largest weight; 1 or more, or a token that the long context helps would count for less.

    Returns:
        ``[B, T]`` weights in ``[0, gamma]``, 1 for a token that has no short context; NaN where both are ``-inf``.

    Raises:
        ValueError: If ``gamma`` is below 1, or more than the log-likelihoods' type can hold, or shapes disagree.

    Example:
        >>> soft_influence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0]))
        tensor([1., 5.])
    """
    check_gamma(gamma, long.dtype if long.is_floating_point() else torch.float32)
    difference = long_short_difference(long.detach(), short.detach())
    # Not `exp(difference).clamp(max=gamma)`: its rounding would decide whether a weight is at the cap.
    return torch.where(difference >= math.log(gamma), float(gamma), difference.exp())


def check_gamma(gamma: float, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a largest weight that is below 1, no number, or beyond what `dtype` holds with a ``ValueError``."""
    if not 1 <= gamma <= torch.finfo(dtype).max:
        raise ValueError(
            "`gamma` caps weights that are 1 for an unhelped token, so it must be >= 1 and finite, at most"
            f" {torch.finfo(dtype).max:.4g} in {str(dtype).removeprefix('torch.')}, got {gamma}."
        )


def mutual_information(long: Tensor, short: Tensor, *, part: Part = "positive", shift: float = 1.0) -> Tensor:
    r"""How much a token and its far context tell of each other, given the short context, in nats.

    .. math:: \mathrm{PMI}_t = \ell_t^{long} - \ell_t^{short}, \qquad
        w_t = \max(\pm\mathrm{PMI}_t - \log s, 0) \ \text{or}\ |\mathrm{PMI}_t|

    The pointwise mutual information is the LSD of Fang et al. (2025). Its parts are weights of Helm et al. (2025),
    "Token Weighting for Long-Range Language Modeling", https://arxiv.org/abs/2503.09202: ``positive`` is their PPMI,
    ``negative`` their NPMI (the negative part, not the measure divided by its largest value), ``absolute`` their dense
    score. They scale the weights to a mean of 1 over each row; here they are as they are. It carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        part: Which tokens get a weight.
        shift: How many times likelier one context must make a token than the other for a weight above 0; above 0. A
            value other than 1 has no meaning for ``absolute``.

    Returns:
        ``[B, T]`` weights, 0 or more; for ``shift`` 1 they are 0 for a token that has no short context.

    Raises:
        ValueError: If ``part`` is unknown, or ``shift`` is not above 0, infinite, or not 1 for ``absolute``.

    Example:
        >>> mutual_information(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -1.0]))
        tensor([0., 3., 0.])
    """
    check_part(part, shift)
    difference = long_short_difference(long.detach(), short.detach())
    if part == "absolute":
        return difference.abs()
    return ((difference if part == "positive" else -difference) - math.log(shift)).clamp(min=0)


def check_part(part: str, shift: float) -> None:
    """Refuse an unknown part of the mutual information and a shift without a meaning with a ``ValueError``."""
    if part not in get_args(Part):
        raise ValueError(f"`part` must be one of {', '.join(get_args(Part))}, got '{part}'.")
    if not 0 < shift < math.inf:
        raise ValueError(f"`shift` divides a ratio of likelihoods, so it must be above 0 and finite, got {shift}.")
    if part == "absolute" and shift != 1:
        raise ValueError(f"`shift` moves the border between two parts, and 'absolute' takes both: leave out {shift}.")


def threshold_influence(long: Tensor, short: Tensor, *, threshold: float = 0.5) -> Tensor:
    r"""1 for a token that the far context changes much, for better or worse, and 0 for the others.

    .. math:: w_t = [\, |\ell_t^{long} - \ell_t^{short}| > \tau \,]

    A pointwise variant of the sparse weights of Helm et al. (2025), https://arxiv.org/abs/2503.09202, which are those
    of `largest_influence`: here the weight of a token depends on no other token. It carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        threshold: Smallest difference, in nats; 0 or more.

    Returns:
        ``[B, T]`` weights, 0 or 1; 0 for a token that has no short context.

    Raises:
        ValueError: If ``threshold`` is negative, infinite or not a number.

    Example:
        >>> threshold_influence(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -1.0]))
        tensor([0., 1., 1.])
    """
    check_threshold(threshold)
    return (long_short_difference(long.detach(), short.detach()).abs() > threshold).to(long.dtype)


def check_threshold(threshold: float) -> None:
    """Refuse a threshold of a size that is negative, infinite or not a number with a ``ValueError``."""
    if not 0 <= threshold < math.inf:
        raise ValueError(
            f"`threshold` bounds the size of a difference, so it must be >= 0 and finite, got {threshold}."
        )


def largest_influence(long: Tensor, short: Tensor, scored: Tensor, *, fraction: float) -> Tensor:
    r"""Select the tokens of each sequence that the far context changes most, for better or worse.

    .. math:: w_t = [\, |\ell_t^{long} - \ell_t^{short}| \ge q \,]

    The sparse weights of Helm et al. (2025), https://arxiv.org/abs/2503.09202: for each sequence ``q`` is such that
    ``fraction`` of its scored tokens have weight 1, at least one. Tokens with equal differences are treated alike, and
    tokens without a difference have weight 0. It carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        scored: ``[B, T]`` bool.
        fraction: Above 0, at most 1.

    Returns:
        ``[B, T]`` weights, 0 or 1.

    Raises:
        ValueError: If ``fraction`` is not in (0, 1].

    Example:
        >>> long, short = torch.tensor([[0.0, -1.0, -1.0, -3.0]]), torch.tensor([[0.0, -1.5, -4.0, -2.0]])
        >>> largest_influence(long, short, torch.tensor([[False, True, True, True]]), fraction=0.67)
        tensor([[0., 0., 1., 1.]])
    """
    check_fraction(fraction)
    size = long_short_difference(long.detach(), short.detach()).abs().masked_fill(~scored, 0)
    count = (fraction * scored.sum(-1, keepdim=True)).round().long().clamp(1, size.shape[-1])
    smallest = size.sort(dim=-1, descending=True).values.gather(-1, count - 1)
    return ((size >= smallest) & (size > 0)).to(long.dtype)


def check_fraction(fraction: float) -> None:
    """Refuse a fraction of tokens that is not in (0, 1] with a ``ValueError``."""
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be above 0 and at most 1, got {fraction}.")
