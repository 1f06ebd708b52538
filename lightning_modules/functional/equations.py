"""The equations of the paper: key tokens and LongPPL, token weights and LongCE (Fang et al., 2025).

All are pure functions of two log-likelihoods of each token: ``long``, given everything before it, and ``short``, given
its short context.
"""

import math

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.checks import ROUNDING_TOLERANCE


def long_short_difference(long: Tensor, short: Tensor) -> Tensor:
    r"""Compute the long-short difference (LSD): how much likelier the long context makes each token, in nats.

    .. math:: \mathrm{LSD}(x_t) = \log P(x_t \mid \text{long context}) - \log P(x_t \mid \text{short context})

    Equation 2 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. It is differentiable; the functions below are
    not.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.

    Returns:
        ``[B, T]`` differences in nats, 0 for a token that has no short context; NaN where both are ``-inf``.

    Raises:
        ValueError: If the shapes differ, or either is not floating point.

    Example:
        >>> long_short_difference(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -4.0]))
        tensor([0., 3.])
    """
    if long.shape != short.shape or not (long.is_floating_point() and short.is_floating_point()):  # it would broadcast
        kinds = [f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}" for given in (long, short)]
        raise ValueError(
            f"`long` and `short` must be floating-point log-likelihoods of the same shape, got {' and '.join(kinds)}."
        )
    # Equation 2. Not detached: the functions below detach, so that no gradient flows through a weight.
    return long - short


def key_token_mask(long: Tensor, short: Tensor, *, alpha: float = 2.0, beta: float = -2.0) -> Tensor:
    r"""Return the key tokens: the long context helps a lot, and the model predicts the token well with it.

    .. math:: \mathrm{LSD}(x_t) > \alpha \ \text{and}\ \mathrm{LCL}(x_t) > \beta

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771; LCL is the long log-likelihood (Equation 3).

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        alpha: Threshold of the long-short difference, in nats. It must be 0 or more, or tokens that have no long
            context would count.
        beta: Threshold of the long log-likelihood, in nats. It must be below 0, or no token could count; ``-inf``
            disables it.

    Returns:
        ``[B, T]`` bool.

    Raises:
        ValueError: If ``alpha`` is negative or infinite, ``beta`` is not negative, either is NaN, or the shapes
            differ.

    Example:
        >>> key_token_mask(torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -4.0, -9.0]))
        tensor([False,  True, False])
    """
    check_thresholds(alpha, beta)
    # Equation 4. Both comparisons are strict, and NaN compares as false: such a token is not key.
    return (long_short_difference(long, short) > alpha) & (long > beta)


def long_perplexity(log_likelihood: Tensor, influence: Tensor) -> Tensor:
    r"""Compute LongPPL: the exponential of the influence-weighted mean negative log-likelihood.

    .. math:: \mathrm{LongPPL} = \exp\Big(-\frac{\sum_t I_t \, \ell_t}{\sum_t I_t}\Big)

    Equation 4 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The influence determines the metric: the
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


def soft_influence(long: Tensor, short: Tensor, *, gamma: float = 5.0) -> Tensor:
    r"""Compute the LongCE weight of each token: how many times likelier the long context makes it, capped.

    .. math:: I_t = \min\big(\exp(\ell_t^{long} - \ell_t^{short}),\ \gamma\big)

    Equation 7 of Fang et al. (2025), https://arxiv.org/abs/2410.23771. The result carries no gradient.

    Args:
        long: ``[B, T]`` log-likelihoods given everything before the token, in nats.
        short: ``[B, T]`` log-likelihoods given the short context, equal to ``long`` for a token without one.
        gamma: Largest weight. It must be 1 or more, because 1 is the weight of a token without a short context.

    Returns:
        ``[B, T]`` weights in ``[0, gamma]``, 1 for a token that has no short context; NaN where both are ``-inf``.

    Raises:
        ValueError: If ``gamma`` is below 1 or beyond the range of the log-likelihoods' dtype, or the shapes differ.

    Example:
        >>> soft_influence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -9.0]))
        tensor([1., 5.])
    """
    check_gamma(gamma, long.dtype if long.is_floating_point() else torch.float32)
    difference = long_short_difference(long.detach(), short.detach())
    # Compare before `exp`: in `exp(difference).clamp(max=gamma)` rounding would decide whether a weight is at the cap.
    return torch.where(difference >= math.log(gamma), float(gamma), difference.exp())


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


def check_thresholds(alpha: float, beta: float) -> None:
    """Raise a ``ValueError`` for thresholds that no token could pass, or that tokens without a long context would."""
    if not 0 <= alpha < math.inf:
        raise ValueError(f"`alpha` must be finite and 0 or more: a key token gains from the long context, got {alpha}.")
    if not beta < 0:
        raise ValueError(f"`beta` must be negative, because it is a lower bound of a log-likelihood, got {beta}.")


def check_gamma(gamma: float, dtype: torch.dtype = torch.float32) -> None:
    """Raise a ``ValueError`` for a largest weight that is below 1, NaN, or beyond the range of ``dtype``."""
    if not 1 <= gamma <= torch.finfo(dtype).max:
        raise ValueError(
            "`gamma` caps weights that are 1 where the long context makes no difference: it must be from 1 to"
            f" {torch.finfo(dtype).max:.4g}, the largest {str(dtype).removeprefix('torch.')} number, got {gamma}."
        )


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
