"""LongCE from hidden states in one pass over chunks: loss, token weights and gradients together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_modules.functional.linear_head import LinearHead, logits_buffer, wide_linear
from lightning_modules.functional.log_likelihood import (
    Head,
    check_chunk_size,
    default_chunk_size,
    scored_tokens,
    softmax_blocks,
)
from lightning_modules.functional.windows import check_window_share


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
        share: Probability that a token's window was scored. Influence is measured against that of a token without a
            short context and divided by it, so that weights are right on average: ``1 + (I - 1) / share`` for LongCE.
            They can be below 0.
    """

    influence: Callable[[Tensor, Tensor], Tensor]
    short: Tensor | None = None
    differs: Tensor | None = None
    share: float = 1.0


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
        ValueError: As of `token_log_likelihood`, or if the weighing is of other tokens or its share not in (0, 1].
    """
    check_chunk_size(chunk_size)
    _check_weighing(weighing, labels)
    predictors, targets, scored = scored_tokens(hidden_states, labels)
    short, differs = (part if part is None else part[scored] for part in (weighing.short, weighing.differs))
    tokens = _Tokens(targets, head, weighing._replace(short=short, differs=differs))
    size = chunk_size or default_chunk_size(hidden_states)
    loss, log_likelihood, weight = _FusedLoss.apply(predictors, tokens, size, *parameters)
    empty = log_likelihood.new_zeros(labels.shape)
    return WeightedLoss(loss, empty.masked_scatter(scored, log_likelihood), empty.masked_scatter(scored, weight))


def _check_weighing(weighing: Weighing, labels: Tensor) -> None:
    parts = [part for part in (weighing.short, weighing.differs) if part is not None]
    if len(parts) == 1 or any(part.shape != labels.shape for part in parts):
        raise ValueError(
            f"`short` and `differs` of the weighing must both be {list(labels.shape)}, as `labels`, or None,"
            f" got {[list(part.shape) for part in parts]}."
        )
    check_window_share(weighing.share)


class _Tokens(NamedTuple):
    """The scored tokens, and how they become a loss."""

    labels: Tensor
    head: Head
    weighing: Weighing


class _FusedLoss(torch.autograd.Function):
    """Loss of ``[N, D]`` predictors; its gradients are formed in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, predictors: Tensor, tokens: _Tokens, size: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        head = tokens.head
        chunks: _LinearChunks | _AnyChunks
        if isinstance(head, LinearHead) and head.soft_cap is None:
            chunks = _LinearChunks(predictors, head, size)
        else:
            chunks = _AnyChunks(predictors, head, parameters)
        hidden_gradient = torch.empty_like(predictors)
        log_likelihoods, weights = [], []
        for start in range(0, len(predictors), size):
            piece = slice(start, start + size)
            logits = chunks.logits(piece)
            log_likelihood, weight = _weigh_and_differentiate(logits, tokens, piece)
            hidden_gradient[piece] = chunks.backward(piece, logits)
            del logits  # or the next chunk's meet them
            log_likelihoods.append(log_likelihood)
            weights.append(weight)
        nothing = predictors.new_zeros(0, dtype=torch.promote_types(predictors.dtype, torch.float32))
        log_likelihood, weight = (torch.cat([nothing, *parts]) for parts in (log_likelihoods, weights))
        ctx.count = max(len(predictors), 1)
        means = {p: total.div_(ctx.count).to(p.dtype) for p, total in chunks.sums.items()}
        ctx.gradients = [hidden_gradient, None, None, *(means.get(p) for p in parameters)]
        ctx.mark_non_differentiable(log_likelihood, weight)
        return -(log_likelihood * weight).sum() / ctx.count, log_likelihood, weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("The gradients of this loss were given away: compute it again for a second backward.")
        (hidden, *parameters), ctx.gradients = ctx.gradients, None
        # A token's share is a small number, which float16 cannot hold: only with the upstream gradient, in which a
        # scaled loss has its scale, it is divided by the number of tokens.
        _scale(hidden, upstream / ctx.count)
        return hidden, None, None, *(part if part is None else _scale(part, upstream) for part in parameters[2:])


class _AnyChunks:
    """Logits of chunks of tokens and their gradients, by autograd through the head."""

    def __init__(self, predictors: Tensor, head: Head, parameters: Sequence[Tensor]) -> None:
        self.predictors, self.head = predictors, head
        self.sums = {parameter: _zeros(parameter) for parameter in parameters if parameter.requires_grad}

    def logits(self, piece: slice) -> Tensor:
        """``[n, V]``, to be overwritten by the slope in them."""
        with torch.enable_grad():
            self.chunk = self.predictors[piece].detach().requires_grad_()
            self.output = self.head(self.chunk)
        return self.output.detach()

    def backward(self, piece: slice, slope: Tensor) -> Tensor:
        """``[n, D]`` gradient of the chunk; that of the parameters is added up."""
        inputs = [self.chunk, *self.sums]
        gradient, *contributions = torch.autograd.grad(self.output, inputs, slope, allow_unused=True)
        del self.output
        for total, contribution in zip(self.sums.values(), contributions, strict=True):
            if contribution is not None:
                total += contribution
        return gradient


class _LinearChunks:
    """The same for a linear head: one buffer for the logits of all chunks, and no second gradient of the weight."""

    def __init__(self, predictors: Tensor, head: LinearHead, size: int) -> None:
        self.head = head
        self.rows, self.weight, self.bias = head.operands(predictors)
        self.buffer = logits_buffer(self.rows, min(size, len(predictors)), len(self.weight))
        self.sums = {p: _zeros(p) for p in (head.weight, head.bias) if p is not None and p.requires_grad}

    def logits(self, piece: slice) -> Tensor:
        """``[n, V]``, to be overwritten by the slope in them."""
        return wide_linear(self.rows[piece], self.weight, self.bias, self.buffer)

    def backward(self, piece: slice, slope: Tensor) -> Tensor:
        """``[n, D]`` gradient of the chunk; that of weight and bias is added up."""
        rows, slope = self.rows[piece], slope.to(self.rows.dtype)
        if (total := self.sums.get(self.head.weight)) is not None:
            if total.dtype == rows.dtype:
                total.addmm_(slope.T, rows)
            else:
                total += slope.T @ rows
        if self.head.bias is not None and self.head.bias in self.sums:
            self.sums[self.head.bias] += slope.sum(0) * self.head.scale
        gradient = slope @ self.weight
        return gradient if self.head.scale == 1.0 else gradient * self.head.scale


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place, for a second copy of the head's gradient would meet all activations of the decoder.

    A few rows at a time in the factor's own precision: in half precision the factor itself would be rounded.
    """
    for rows in gradient.split(4096):
        rows.copy_(rows * factor if rows.dtype == factor.dtype else rows.to(factor.dtype).mul_(factor))
    return gradient


def _zeros(parameter: Tensor) -> Tensor:
    # Many small contributions: in bfloat16 the sum would stop growing.
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _weigh_and_differentiate(logits: Tensor, tokens: _Tokens, piece: slice) -> tuple[Tensor, Tensor]:
    """Log-likelihoods and weights ``[n]`` of a chunk; its logits are overwritten by the slope of the losses' sum."""
    results = []
    for rows, slope, log_likelihood in softmax_blocks(logits, tokens.labels[piece]):
        scored = slice(piece.start + rows.start, piece.start + rows.stop)
        weight = token_weights(log_likelihood, tokens.weighing, scored).to(log_likelihood.dtype)
        column = weight.unsqueeze(-1)
        slope.mul_(column).scatter_add_(-1, tokens.labels[scored].unsqueeze(-1), -column)
        if slope.dtype != logits.dtype:  # else it is a view of them
            logits[rows] = slope
        results.append((log_likelihood, weight))
    log_likelihoods, weights = zip(*results, strict=True)
    return torch.cat(log_likelihoods), torch.cat(weights)


def token_weights(long: Tensor, weighing: Weighing, piece: slice | Tensor) -> Tensor:
    """``[n]`` weights of those tokens of the weighing that a slice or mask names, from their long log-likelihoods."""
    influence, short, differs, share = weighing
    if short is None or differs is None:
        return influence(long, long)
    weight = influence(long, torch.where(differs[piece], short[piece].to(long.dtype), long))
    if share < 1:
        unhelped = influence(long, long)
        weight = unhelped + (weight - unhelped) / share
    return weight
