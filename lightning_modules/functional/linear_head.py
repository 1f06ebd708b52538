"""A head that is one matrix product, with logits in tiles that never leave the processor's cache."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class LinearHead(NamedTuple):
    """Maps ``[.., D]`` hidden states to ``[.., V]`` logits: ``cap(scale * (weight @ h + bias))``.

    Called like any other head; code for linear heads needs less memory and fewer products.
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V], or None
    scale: float = 1.0  # the logits are multiplied by it
    soft_cap: float | None = None  # the logits become tanh(logits / soft_cap) * soft_cap, after the scale

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """``[.., V]`` logits."""
        logits = F.linear(hidden_states, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def operands(self, hidden_states: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias of the product that gives the logits before the cap.

        The scale is in them. By default they have the type that autocast would give them.
        """
        bias = self.bias
        if self.scale != 1.0:
            hidden_states, bias = hidden_states * self.scale, None if bias is None else bias * self.scale
        device = hidden_states.device.type
        if dtype is None:
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        return hidden_states.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype)


def logits_buffer(operand: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return ``[rows, columns]`` memory for logits to be reused; None where `wide_linear` allocates them."""
    return None if _widens(operand) else operand.new_empty(rows, columns)


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor | None) -> Tensor:
    """Return ``[n, V]`` logits ``rows @ weight.T + bias``, in the first rows and columns of the buffer if there is one.

    Float32 where the device multiplies half-precision operands into it: a logit of 20 in bfloat16 is off by 0.06.
    """
    if buffer is None:
        logits = _widening_product(rows, weight)
    else:
        logits = torch.mm(rows, weight.T, out=buffer[: len(rows), : len(weight)])
    return logits if bias is None else logits.add_(bias)


def wide_logits(rows: Tensor, head: "Callable[[Tensor], Tensor] | LinearHead") -> Tensor:
    """``[n, V]`` logits of ``[n, D]`` hidden states, float32 or wider; as exact as those that tokens are scored by."""
    if isinstance(head, LinearHead):
        operands, weight, bias = head.operands(rows)
        logits = wide_linear(operands, weight, bias, logits_buffer(operands, len(operands), len(weight)))
        logits = logits if head.soft_cap is None else logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    else:
        logits = head(rows)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _widens(operand: Tensor) -> bool:
    return operand.device.type == "cuda" and operand.dtype in (torch.bfloat16, torch.float16)


def _widening_product(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(rows, weight.T, out_dtype=torch.float32)


def linear_log_likelihood(hidden_states: Tensor, head: LinearHead, targets: Tensor, *, chunk_size: int) -> Tensor:
    """Compute the log-likelihood of each target, without ever holding the logits of a chunk.

    Logits exist for a tile of the vocabulary at a time, few enough to stay in a processor's cache: writing them to main
    memory and reading them again costs as much time as a fifth of the product itself. The backward pass computes them
    again, four products with the weight instead of three, and forms the gradients tile by tile in the same memory.
    The forward pass is the same with and without gradient, so that equal inputs have equal log-likelihoods.

    From ``[N, D]`` hidden states and ``[N]`` int64 targets follow ``[N]`` log-likelihoods in nats; float32, or float64
    for float64 operands. Gradients flow once to the hidden states and to the weight and bias of the head. A matrix
    product takes ``chunk_size`` hidden states.
    """
    result: Tensor = _LinearLogLikelihood.apply(
        hidden_states, head.weight, head.bias, targets, head.scale, head.soft_cap, chunk_size
    )
    return result


class _LinearLogLikelihood(torch.autograd.Function):
    """Log-likelihoods whose backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        soft_cap: float | None,
        chunk_size: int,
    ) -> Tensor:
        ctx.head, ctx.chunk_size = (scale, soft_cap), min(chunk_size, max(1, len(targets)))
        operands = LinearHead(weight, bias, scale).operands(hidden_states)
        ctx.dtype = operands[0].dtype  # autocast may be off when gradients are computed
        tiles = _Tiles(*operands, soft_cap, ctx.chunk_size)
        chunks = [part.split(ctx.chunk_size) for part in (operands[0], targets)]
        parts = [_forward_chunk(tiles, *chunk) for chunk in zip(*chunks, strict=True)]
        log_likelihood, total = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_states, weight, bias, targets, total)
        return log_likelihood

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, targets, total = ctx.saved_tensors
        scale, soft_cap = ctx.head
        with torch.autocast(hidden_states.device.type, enabled=False):
            operands = LinearHead(weight, bias, scale).operands(hidden_states, ctx.dtype)
            tiles = _Tiles(*operands, soft_cap, ctx.chunk_size)
            grad_hidden = torch.empty_like(hidden_states)
            # Float32, because many small contributions are summed: in bfloat16 the sum would stop growing.
            wide = torch.promote_types(ctx.dtype, torch.float32)
            grad_weight, grad_bias = (
                torch.zeros_like(parameter, dtype=wide) if wanted else None
                for parameter, wanted in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
            )
            chunks = [part.split(ctx.chunk_size) for part in (operands[0], targets, total, upstream, grad_hidden)]
            for rows, chunk_targets, chunk_total, chunk_upstream, target in zip(*chunks, strict=True):
                grad = _backward_chunk(tiles, rows, chunk_targets, chunk_total, chunk_upstream, grad_weight, grad_bias)
                target.copy_(grad.mul_(scale))
            if grad_bias is not None:
                grad_bias = grad_bias.mul_(scale).to(bias.dtype)
            if grad_weight is not None:
                grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _Tiles:
    """The logits of a chunk of hidden states, a tile of the vocabulary at a time, in memory for one tile."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, chunk_size: int
    ) -> None:
        self.weight, self.bias, self.soft_cap = weight, bias, soft_cap
        self.width = max(1, _tile_elements(rows) // chunk_size)
        self.buffer = logits_buffer(rows, chunk_size, min(self.width, len(weight)))

    def of(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield tokens of the vocabulary and their ``[n, tile]`` logits, in memory that the next tile overwrites."""
        for start in range(0, len(self.weight), self.width):
            columns = slice(start, start + self.width)
            yield columns, self._logits(rows, columns)  # no name here holds them, or the next tile's would meet them

    def _logits(self, rows: Tensor, columns: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[columns]
        logits = wide_linear(rows, self.weight[columns], bias, self.buffer)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def _forward_chunk(tiles: _Tiles, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[n]`` log-likelihoods and ``[n]`` log-sum-exps over the vocabulary, by a running sum over tiles."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_full((len(targets), 1), -torch.inf, dtype=wide)
    target_logit = torch.zeros_like(total)
    for columns, logits in tiles.of(rows):
        index, inside = _target_columns(targets, columns, logits.shape[1])
        target_logit = torch.where(inside, logits.gather(-1, index).to(wide), target_logit)
        parts = logits.to(wide)
        # A bias may be -inf, for tokens that do not exist, and a whole tile of them has no softmax.
        tile_total = log_sum_exp_and_softmax(parts) if tiles.bias is None else parts.logsumexp(-1, keepdim=True)
        total = torch.logaddexp(total, tile_total)
        del logits, parts
    return (target_logit - total).squeeze(-1), total.squeeze(-1)


def _backward_chunk(
    tiles: _Tiles,
    rows: Tensor,
    targets: Tensor,
    total: Tensor,
    upstream: Tensor,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Return the ``[n, D]`` gradient of the hidden states, and add to those of weight and bias."""
    grad_rows = torch.zeros_like(rows, dtype=total.dtype)
    for columns, logits in tiles.of(rows):
        grad = logits.to(total.dtype)
        slope = None if tiles.soft_cap is None else 1 - (grad / tiles.soft_cap).square()
        index, inside = _target_columns(targets, columns, grad.shape[1])
        differentiate_softmax_(grad, index, inside, total, upstream)
        if slope is not None:
            grad.mul_(slope)
        if grad_bias is not None:
            grad_bias[columns] += grad.sum(0)
        grad = grad.to(rows.dtype)
        _add_product(grad_rows, grad, tiles.weight[columns])
        if grad_weight is not None:
            _add_product(grad_weight[columns], grad.T, rows)
        del logits, grad
    return grad_rows


def differentiate_softmax_(logits: Tensor, index: Tensor, inside: Tensor, total: Tensor, upstream: Tensor) -> None:
    """Replace ``[n, v]`` logits, of all tokens or some, by the gradient in them of the targets' log-likelihoods.

    ``[n, 1]`` columns of the targets count where they are ``inside`` these tokens; ``[n]`` totals are log-sum-exps over
    the whole vocabulary, and ``[n]`` upstream gradients those of the log-likelihoods.
    """
    upstream = upstream.to(logits.dtype).unsqueeze(-1)
    logits.sub_(total.unsqueeze(-1)).exp_().mul_(-upstream)  # minus the probabilities ..
    logits.scatter_add_(-1, index, torch.where(inside, upstream, 0.0))  # .. and one for the target


def _target_columns(targets: Tensor, columns: slice, width: int) -> tuple[Tensor, Tensor]:
    """Return ``[n, 1]`` columns of the targets in a tile, and whether they are in it."""
    index = targets.unsqueeze(-1) - columns.start
    return index.clamp(0, width - 1), (index >= 0) & (index < width)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _tile_elements(operand: Tensor) -> int:
    return 2**21 if operand.device.type == "cpu" else 2**27


def log_sum_exp_and_softmax(logits: Tensor) -> Tensor:
    """Return ``[n, 1]`` log-sum-exp of ``[n, V]`` logits of float32 or float64, which their softmax replaces.

    The kernel of softmax reads the logits once, where log-sum-exp and exponential take several passes. The sum follows
    from the largest probability.
    """
    largest = logits.amax(-1, keepdim=True)
    if logits.device.type == "cpu":
        torch.softmax(logits, -1, out=logits)
    else:
        logits.copy_(logits.softmax(-1))
    return largest - logits.amax(-1, keepdim=True).log()
