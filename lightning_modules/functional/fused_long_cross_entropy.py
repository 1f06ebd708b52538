"""LongCE from hidden states in one pass over chunks: loss, token weights and gradients together."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional.log_likelihood import Head, check_inputs, consume_logits, default_chunk_size


class WeightedLoss(NamedTuple):
    """What one training step needs of its tokens.

    Attributes:
        loss: Scalar in nats per scored token; gradients flow through it.
        log_likelihood: ``[B, T]`` log-likelihoods in nats, without gradient.
        influence: ``[B, T]`` weights, without gradient; 0 where a token is not scored.
    """

    loss: Tensor
    log_likelihood: Tensor
    influence: Tensor


class Weighing(NamedTuple):
    """How the tokens of a batch are weighed.

    Attributes:
        influence: Weights ``[..]`` from long and short log-likelihoods ``[..]`` in nats, pointwise.
        short: ``[B, T]`` log-likelihoods given the short context, in nats; None if ``influence`` looks at none.
        differs: ``[B, T]`` bool, where there is a short context; elsewhere the long log-likelihood stands for it.
    """

    influence: Callable[[Tensor, Tensor], Tensor]
    short: Tensor | None = None
    differs: Tensor | None = None


def fused_long_cross_entropy(
    hidden_states: Tensor,
    head: Head,
    parameters: Iterable[nn.Parameter],
    labels: Tensor,
    weighing: Weighing,
    *,
    chunk_size: int | None = None,
) -> WeightedLoss:
    r"""LongCE with its gradients formed while the logits of each chunk exist: they are computed once and never kept.

    Equal to `long_cross_entropy` of `token_log_likelihood`, whose backward pass would compute all logits a second
    time. The weight of a token depends on its own log-likelihoods only, so it is known as soon as its logits are, and
    so are the gradients: three products with the head's weight instead of four.

    Args:
        hidden_states: ``[B, T, D]`` last hidden states, entry ``t`` having seen tokens ``0 .. t``.
        head: Maps ``[N, D]`` hidden states to ``[N, V]`` logits.
        parameters: What ``head`` holds and shall be trained.
        labels: ``[B, T]`` int64 token ids; ``IGNORE_INDEX`` where a token is not scored, column 0 always.
        weighing: How a token's weight follows from its log-likelihoods.
        chunk_size: Scored tokens whose logits exist at the same time; by default 512, and 2048 on an accelerator.

    Returns:
        The loss, and what it was made of.

    Raises:
        ValueError: If shapes disagree, ``chunk_size`` is below 1, or column 0 is scored.
    """
    check_inputs(hidden_states, labels, chunk_size)
    scored = labels.ne(IGNORE_INDEX)
    # The same shift as in `token_log_likelihood`: what stands at t - 1 predicts token t.
    predictors = hidden_states[:, :-1][scored[:, 1:]]
    pair = [part if part is None else part[scored] for part in (weighing.short, weighing.differs)]
    tokens = _Tokens(labels[scored], head, Weighing(weighing.influence, *pair))
    size = chunk_size or default_chunk_size(hidden_states)
    loss, log_likelihood, weight = _FusedLoss.apply(predictors, tokens, size, *parameters)
    empty = log_likelihood.new_zeros(labels.shape)
    return WeightedLoss(loss, empty.masked_scatter(scored, log_likelihood), empty.masked_scatter(scored, weight))


class _Tokens(NamedTuple):
    """The scored tokens, and how they become a loss."""

    labels: Tensor
    head: Head
    weighing: Weighing


class _FusedLoss(torch.autograd.Function):
    """Loss of ``[N, D]`` predictors; its gradients are formed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, predictors: Tensor, tokens: _Tokens, size: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # Many small contributions: in bfloat16 the sum would stop growing.
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        hidden_gradient = torch.empty_like(predictors)
        log_likelihoods, weights = [], []
        for start in range(0, len(predictors), size):
            piece = slice(start, start + size)
            with torch.enable_grad():
                chunk = predictors[piece].detach().requires_grad_()
                logits = tokens.head(chunk)
            log_likelihood, weight, slope = _weigh(logits.detach(), tokens, piece, len(predictors))
            hidden_gradient[piece], *contributions = torch.autograd.grad(
                logits, [chunk, *trained], slope, allow_unused=True
            )
            for total, contribution in zip(sums, contributions, strict=True):
                if contribution is not None:
                    total += contribution
            log_likelihoods.append(log_likelihood)
            weights.append(weight)
        nothing = predictors.new_zeros(0, dtype=torch.promote_types(predictors.dtype, torch.float32))
        log_likelihood, weight = (torch.cat([nothing, *parts]) for parts in (log_likelihoods, weights))
        gradients = iter(total.to(p.dtype) for total, p in zip(sums, trained, strict=True))
        ctx.save_for_backward(hidden_gradient, *(next(gradients) if p.requires_grad else None for p in parameters))
        ctx.mark_non_differentiable(log_likelihood, weight)
        return -(log_likelihood * weight).sum() / max(len(predictors), 1), log_likelihood, weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        hidden, *parameters = (part if part is None else part * upstream.to(part.dtype) for part in ctx.saved_tensors)
        return hidden, None, None, *parameters


def _weigh(logits: Tensor, tokens: _Tokens, piece: slice, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-likelihoods and weights ``[n]`` of a chunk, and the loss's slope ``[n, V]`` in its logits, made in place."""
    labels = tokens.labels[piece]
    log_likelihood, slope, denominators = consume_logits(logits, labels)
    influence, short, differs = tokens.weighing
    if short is None or differs is None:
        weight = influence(log_likelihood, log_likelihood)
    else:
        short = torch.where(differs[piece], short[piece].to(log_likelihood.dtype), log_likelihood)
        weight = influence(log_likelihood, short)
    weight = weight.to(log_likelihood.dtype)
    share = (weight / count).unsqueeze(-1)
    slope.mul_(share / denominators).scatter_add_(-1, labels.unsqueeze(-1), -share)
    return log_likelihood, weight, slope.to(logits.dtype)
