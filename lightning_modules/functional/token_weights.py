"""Other token weights for training, from the same two log-likelihoods: Helm et al. (2025)."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_modules.functional.checks import check_fraction
from lightning_modules.functional.equations import long_short_difference

Part = Literal["positive", "negative", "absolute"]
"""Which tokens get a weight: those that the long context makes likelier, those it makes less likely, or both."""


def mutual_information(long: Tensor, short: Tensor, *, part: Part = "positive", shift: float = 1.0) -> Tensor:
    r"""Compute the mutual information of each token and its far context, given the short context, in nats.

    .. math:: \mathrm{PMI}_t = \ell_t^{long} - \ell_t^{short}, \qquad
        w_t = \max(\pm\mathrm{PMI}_t - \log s, 0) \ \text{or}\ |\mathrm{PMI}_t|

    The pointwise mutual information is the LSD of Fang et al. (2025). Its parts are the weights of Helm et al. (2025),
    "Token Weighting for Long-Range Language Modeling", https://arxiv.org/abs/2503.09202: ``positive`` is their PPMI,
    ``negative`` their NPMI (the negative part, not normalized PMI), ``absolute`` their dense score. They scale the
    weights to a mean of 1 over each sequence (`scale_to_mean_one`). The result carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        part: Which tokens get a weight.
        shift: How many times likelier one context must make a token than the other for a weight above 0. It must be
            above 0, and 1 for ``absolute``.

    Returns:
        ``[B, T]`` weights, 0 or more; for ``shift`` 1 they are 0 for a token that has no short context.

    Raises:
        ValueError: If ``part`` is unknown, or ``shift`` is 0 or less, infinite, or not 1 for ``absolute``.

    Example:
        >>> mutual_information(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -1.0]))
        tensor([0., 3., 0.])
    """
    check_part(part, shift)
    difference = long_short_difference(long.detach(), short.detach())
    if part == "absolute":
        return difference.abs()
    # A likelihood ratio of `shift` is a difference of log(shift) nats: where it is smaller, the weight is 0.
    return ((difference if part == "positive" else -difference) - math.log(shift)).clamp(min=0)


def check_part(part: str, shift: float) -> None:
    """Raise a ``ValueError`` for an unknown part of the mutual information, or a shift that has no meaning."""
    valid = shift == 1 if part == "absolute" else 0 < shift < math.inf
    if part not in get_args(Part) or not valid:
        raise ValueError(
            f"`part` must be one of {', '.join(get_args(Part))}, and `shift`, which divides a likelihood ratio, finite"
            f" and above 0, or 1 for `absolute`, which uses all tokens: got '{part}' and {shift}."
        )


def threshold_weights(long: Tensor, short: Tensor, *, threshold: float = 0.5) -> Tensor:
    r"""Return weight 1 for tokens that the far context changes a lot, for better or worse, and 0 for the others.

    .. math:: w_t = [\, |\ell_t^{long} - \ell_t^{short}| > \tau \,]

    A pointwise variant of the sparse weights of Helm et al. (2025), https://arxiv.org/abs/2503.09202: the weight of a
    token does not depend on other tokens, as it does in `top_fraction_weights`. The result carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        threshold: Smallest difference, in nats; 0 or more.

    Returns:
        ``[B, T]`` weights, 0 or 1; 0 for a token that has no short context.

    Raises:
        ValueError: If ``threshold`` is negative, infinite or NaN.

    Example:
        >>> threshold_weights(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -1.0]))
        tensor([0., 1., 1.])
    """
    check_threshold(threshold)
    return (long_short_difference(long.detach(), short.detach()).abs() > threshold).to(long.dtype)


def check_threshold(threshold: float) -> None:
    """Raise a ``ValueError`` for a threshold that is negative, infinite or NaN."""
    if not 0 <= threshold < math.inf:
        raise ValueError(f"`threshold` is for absolute differences, so it must be finite and >= 0, got {threshold}.")


def top_fraction_weights(long: Tensor, short: Tensor, scored: Tensor, *, fraction: float) -> Tensor:
    r"""Return weight 1 for the fraction of each sequence that the far context changes most, for better or worse.

    .. math:: w_t = [\, |\ell_t^{long} - \ell_t^{short}| \ge q \,]

    The sparse weights of Helm et al. (2025), https://arxiv.org/abs/2503.09202: for each sequence ``q`` is such that
    ``fraction`` of its scored tokens, and at least one, have weight 1. Tokens with equal differences have equal
    weights, and tokens without a difference have weight 0. The result carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        scored: ``[B, T]`` bool, which tokens are scored.
        fraction: Fraction of the scored tokens, above 0 and at most 1.

    Returns:
        ``[B, T]`` weights, 0 or 1.

    Raises:
        ValueError: If ``fraction`` is not in (0, 1].

    Example:
        >>> long, short = torch.tensor([[0.0, -1.0, -1.0, -3.0]]), torch.tensor([[0.0, -1.5, -4.0, -2.0]])
        >>> top_fraction_weights(long, short, torch.tensor([[False, True, True, True]]), fraction=0.67)
        tensor([[0., 0., 1., 1.]])
    """
    check_fraction("`fraction`", fraction)
    # 1. Rank the scored tokens of each sequence by the size of their difference; the others count as unchanged.
    change = long_short_difference(long.detach(), short.detach()).abs().masked_fill(~scored, 0)
    # 2. Compare with q instead of using the ranks: equal differences must have equal weights.
    return ((change >= _smallest_selected(change, scored, fraction)) & (change > 0)).to(long.dtype)


def excess_loss_weights(long: Tensor, reference_loss: Tensor, scored: Tensor, *, fraction: float) -> Tensor:
    r"""Return weight 1 for the fraction of each sequence whose loss is furthest above that of a reference model.

    .. math:: w_t = [\, -\ell_t^{long} - \mathcal{L}_t^{ref} \ge q \,]

    Selective language modeling (Rho-1) of Lin et al. (2024), https://arxiv.org/abs/2404.07965, Equations 3 and 4. For
    each sequence ``q`` is such that ``fraction`` of its scored tokens, and at least one, have weight 1. Tokens with
    equal excess have equal weights. The result carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods of the trained model, in nats.
        reference_loss: ``[B, T]`` negative log-likelihoods of the reference model, in nats.
        scored: ``[B, T]`` bool, which tokens are scored.
        fraction: Fraction of the scored tokens, above 0 and at most 1.

    Returns:
        ``[B, T]`` weights, 0 or 1; 0 for a token that is not scored.

    Raises:
        ValueError: If ``fraction`` is not in (0, 1].

    Example:
        >>> long, reference = torch.tensor([[0.0, -1.0, -4.0, -3.0]]), torch.tensor([[0.0, 1.5, 2.0, 1.5]])
        >>> excess_loss_weights(long, reference, torch.tensor([[False, True, True, True]]), fraction=0.67)
        tensor([[0., 0., 1., 1.]])
    """
    check_fraction("`fraction`", fraction)
    excess = (-long.detach() - reference_loss).masked_fill(~scored, -math.inf)
    return ((excess >= _smallest_selected(excess, scored, fraction)) & scored).to(long.dtype)


def _smallest_selected(values: Tensor, scored: Tensor, fraction: float) -> Tensor:
    """Return ``[B, 1]``, for each sequence the smallest of a fraction of its scored tokens with the largest values."""
    # A sequence has at least one selected token.
    count = (fraction * scored.sum(-1, keepdim=True)).round().long().clamp(1, values.shape[-1])
    return values.sort(dim=-1, descending=True).values.gather(-1, count - 1)


def scale_to_mean_one(weights: Tensor, scored: Tensor) -> Tensor:
    r"""Scale the weights of each sequence to a mean of 1 over its scored tokens.

    .. math:: w'_t = w_t \, \frac{n}{\sum_s w_s}

    Helm et al. (2025), https://arxiv.org/abs/2503.09202.

    Args:
        weights: ``[B, T]`` weights, 0 or more.
        scored: ``[B, T]`` bool, which tokens are scored.

    Returns:
        ``[B, T]`` scaled weights; 1 in a sequence whose scored tokens all have weight 0.

    Example:
        >>> scored = torch.tensor([[False, True, True]])
        >>> scale_to_mean_one(torch.tensor([[9.0, 1.0, 3.0]]), scored)[:, 1:]
        tensor([[0.5000, 1.5000]])
    """
    total = weights.masked_fill(~scored, 0).sum(-1, keepdim=True)
    count = scored.sum(-1, keepdim=True)
    return torch.where(total > 0, weights * count / total, 1.0)
