"""Log-likelihoods of a linear head, from logits in tiles that are small enough to stay in the processor's cache."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS_CPU = 2**21
"""Logits in one tile: 8 MiB of float32 stay in the cache of a CPU."""

TILE_ELEMENTS = 2**27
"""The same on an accelerator, where larger products are faster and a tile does not stay in the cache."""


class LinearHead(NamedTuple):
    """Maps ``[.., D]`` hidden states to ``[.., V]`` logits: ``cap(scale * (weight @ h + bias))``.

    It can be called like any other head. `linear_log_likelihood` needs less memory and fewer matrix products with it.
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V], or None
    scale: float = 1.0  # the logits are multiplied by it
    soft_cap: float | None = None  # the logits become tanh(logits / soft_cap) * soft_cap, after the scale

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return ``[.., V]`` logits."""
        logits = F.linear(hidden_states, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def operands(self, hidden_states: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the operands of the matrix product, ``hidden_states @ weight.T + bias``: the logits before the cap.

        The scale is already applied to them. Their dtype is by default the one that autocast would give them.
        """
        bias = self.bias
        if self.scale != 1.0:
            # scale * (W h + b) = W (scale * h) + scale * b: D + V products instead of one for each of the V logits
            # of each token.
            hidden_states = hidden_states * self.scale
            bias = None if bias is None else bias * self.scale
        device = hidden_states.device.type
        if dtype is None:
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        return hidden_states.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype)


def logits_buffer(operand: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return a reusable ``[rows, columns]`` buffer for logits, or None where `wide_linear` has to allocate them."""
    return None if _multiplies_into_float32(operand) else operand.new_empty(rows, columns)


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor | None) -> Tensor:
    """Return ``[n, V]`` logits ``rows @ weight.T + bias``, written to the start of the buffer if there is one.

    They are float32 where the device can multiply half-precision operands into it: in bfloat16 a logit of 20 is off by
    0.06.
    """
    if buffer is None:
        logits = _multiply_into_float32(rows, weight.T)
    else:
        # The last chunk and the last tile are smaller than the buffer.
        logits = torch.mm(rows, weight.T, out=buffer[: len(rows), : len(weight)])
    return logits if bias is None else logits.add_(bias)


def wide_logits(rows: Tensor, head: "Callable[[Tensor], Tensor] | LinearHead") -> Tensor:
    """Return ``[n, V]`` logits of ``[n, D]`` hidden states in float32 or wider, as exact as those used for scoring."""
    if isinstance(head, LinearHead):
        operands, weight, bias = head.operands(rows)
        logits = wide_linear(operands, weight, bias, logits_buffer(operands, len(operands), len(weight)))
        logits = logits if head.soft_cap is None else logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
    else:
        logits = head(rows)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _multiplies_into_float32(operand: Tensor) -> bool:
    # `torch.mm(out_dtype=)` exists for CUDA only, and has no `out=`, so that each result is allocated.
    return operand.device.type == "cuda" and operand.dtype in (torch.bfloat16, torch.float16)


def _multiply_into_float32(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


def linear_log_likelihood(hidden_states: Tensor, head: LinearHead, targets: Tensor, *, chunk_size: int) -> Tensor:
    """Compute the log-likelihood of each target, with logits for one tile of the vocabulary at a time.

    A tile is small enough for the processor's cache: writing logits to main memory and reading them back would take
    another fifth of the time of the matrix product. The backward pass recomputes the logits, which makes four products
    with the weight instead of three, and computes the gradients tile by tile in the same buffer. The forward pass is
    the same with and without gradient, so equal inputs have equal log-likelihoods.

    ``[N, D]`` hidden states predict ``[N]`` int64 targets; a matrix product takes ``chunk_size`` of them. Returns
    ``[N]`` log-likelihoods in nats, float32, or float64 for float64 operands. First-order gradients flow to the hidden
    states and to the head's weight and bias.
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
        ctx.scale = scale
        ctx.soft_cap = soft_cap
        ctx.chunk_size = min(chunk_size, max(1, len(targets)))
        # 1. Cast the operands as autocast would, and remember their dtype: autocast may be off in the backward pass.
        operands = LinearHead(weight, bias, scale).operands(hidden_states)
        rows = operands[0]
        ctx.dtype = rows.dtype
        # 2. Score a chunk of tokens at a time, each over one tile of the vocabulary after the other.
        tiles = _VocabularyTiles(*operands, soft_cap, ctx.chunk_size)
        log_likelihoods = []
        log_sum_exps = []
        for chunk, chunk_targets in zip(rows.split(ctx.chunk_size), targets.split(ctx.chunk_size), strict=True):
            log_likelihood, log_sum_exp = _forward_chunk(tiles, chunk, chunk_targets)
            log_likelihoods.append(log_likelihood)
            log_sum_exps.append(log_sum_exp)
        # 3. Save the log-sum-exp of each token instead of its logits: V times smaller.
        ctx.save_for_backward(hidden_states, weight, bias, targets, torch.cat(log_sum_exps))
        return torch.cat(log_likelihoods)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, weight, bias, targets, log_sum_exp = ctx.saved_tensors
        with torch.autocast(hidden_states.device.type, enabled=False):
            # 1. Rebuild the operands of the forward pass, in its dtype.
            operands = LinearHead(weight, bias, ctx.scale).operands(hidden_states, ctx.dtype)
            tiles = _VocabularyTiles(*operands, ctx.soft_cap, ctx.chunk_size)
            # 2. Allocate the gradients. Those of weight and bias are sums over all tokens, so they are float32: a sum
            #    of many small numbers stops growing in bfloat16.
            grad_hidden = torch.empty_like(hidden_states)
            wide = torch.promote_types(ctx.dtype, torch.float32)
            needs_weight, needs_bias = ctx.needs_input_grad[1:3]
            grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
            grad_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
            # 3. Go through the chunks: each writes the gradient of its hidden states and adds to the other two. The
            #    forward pass multiplied hidden states and bias by the scale, so their gradients are multiplied as well.
            per_token = (operands[0], targets, log_sum_exp, grad_output, grad_hidden)
            chunks = zip(*(tensor.split(ctx.chunk_size) for tensor in per_token), strict=True)
            for rows, chunk_targets, chunk_lse, chunk_grad, grad_rows in chunks:
                grad = _backward_chunk(tiles, rows, chunk_targets, chunk_lse, chunk_grad, grad_weight, grad_bias)
                grad_rows.copy_(grad.mul_(ctx.scale))
            if grad_bias is not None:
                grad_bias = grad_bias.mul_(ctx.scale).to(bias.dtype)
            if grad_weight is not None:
                grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _VocabularyTiles:
    """Logits of a chunk of hidden states for one tile of the vocabulary at a time, in a buffer of one tile."""

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, chunk_size: int
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.soft_cap = soft_cap
        elements = TILE_ELEMENTS_CPU if rows.device.type == "cpu" else TILE_ELEMENTS
        self.width = max(1, elements // chunk_size)
        self.buffer = logits_buffer(rows, chunk_size, min(self.width, len(weight)))

    def columns(self) -> Iterator[slice]:
        """Yield the token ids of each tile."""
        for start in range(0, len(self.weight), self.width):
            yield slice(start, start + self.width)

    def logits(self, rows: Tensor, columns: slice) -> Tensor:
        """Return the ``[n, tile]`` logits of a tile, which may be in a buffer that the next tile overwrites."""
        bias = None if self.bias is None else self.bias[columns]
        logits = wide_linear(rows, self.weight[columns], bias, self.buffer)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


def _forward_chunk(tiles: _VocabularyTiles, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[n]`` log-likelihoods and ``[n]`` log-sum-exps over the vocabulary, accumulated over its tiles."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    log_sum_exp = rows.new_full((len(targets), 1), -torch.inf, dtype=wide)
    # NaN stays where no tile has the target: an accelerator would not wait for a check of the token ids.
    target_logit = torch.full_like(log_sum_exp, torch.nan)
    for columns in tiles.columns():
        logits = tiles.logits(rows, columns)
        # 1. Take the targets' logits, before the log-sum-exp overwrites them. Each target is in one tile.
        index, in_tile = _locate_targets(targets, columns, logits.shape[1])
        target_logit = torch.where(in_tile, logits.gather(-1, index).to(wide), target_logit)
        # 2. Add the tile to the log-sum-exp: log(exp(a) + exp(b)), without overflow.
        wide_tile = logits.to(wide)
        # A bias may be -inf, for ids without a token. A tile of nothing else has no softmax.
        of_tile = log_sum_exp_(wide_tile) if tiles.bias is None else wide_tile.logsumexp(-1, keepdim=True)
        log_sum_exp = torch.logaddexp(log_sum_exp, of_tile)
        del logits, wide_tile  # before the next tile is computed
    return (target_logit - log_sum_exp).squeeze(-1), log_sum_exp.squeeze(-1)


def _backward_chunk(
    tiles: _VocabularyTiles,
    rows: Tensor,
    targets: Tensor,
    log_sum_exp: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """Return the ``[n, D]`` gradient of the hidden states, and add to the gradients of weight and bias."""
    grad_rows = torch.zeros_like(rows, dtype=log_sum_exp.dtype)
    for columns in tiles.columns():
        # 1. Turn the logits into their gradient, in place.
        grad_logits = tiles.logits(rows, columns).to(log_sum_exp.dtype)
        grad_cap = None if tiles.soft_cap is None else 1 - (grad_logits / tiles.soft_cap).square()
        index, in_tile = _locate_targets(targets, columns, grad_logits.shape[1])
        differentiate_softmax_(grad_logits, index, in_tile, log_sum_exp, grad_output)
        if grad_cap is not None:
            grad_logits.mul_(grad_cap)
        # 2. Add its products to the gradients of bias, hidden states and weight. Where the product's operands are in
        #    half precision, the float32 gradient is free before the float32 products need memory.
        if grad_bias is not None:
            grad_bias[columns] += grad_logits.sum(0)
        grad_logits = grad_logits.to(rows.dtype)
        _add_product_(grad_rows, grad_logits, tiles.weight[columns])
        if grad_weight is not None:
            _add_product_(grad_weight[columns], grad_logits.T, rows)
        del grad_logits  # before the next tile is computed
    return grad_rows


def differentiate_softmax_(
    logits: Tensor, index: Tensor, in_tile: Tensor, log_sum_exp: Tensor, grad_output: Tensor
) -> None:
    """Replace logits by their gradient: ``grad_output * (one_hot(target) - softmax(logits))``.

    The ``[n, v]`` logits may be a tile of the vocabulary; ``[n, 1]`` ``index`` and ``in_tile`` locate the targets.
    ``log_sum_exp`` is ``[n]``, over the whole vocabulary, and ``grad_output`` ``[n]``, of the log-likelihoods.
    """
    grad_output = grad_output.to(logits.dtype).unsqueeze(-1)
    # d (z_target - log sum exp z) / d z = one_hot - softmax(z). Targets outside of the tile add 0 to a column of it.
    logits.sub_(log_sum_exp.unsqueeze(-1)).exp_().mul_(-grad_output)
    logits.scatter_add_(-1, index, torch.where(in_tile, grad_output, 0.0))


def _locate_targets(targets: Tensor, columns: slice, width: int) -> tuple[Tensor, Tensor]:
    """Return ``[n, 1]`` columns of the targets in a tile, and whether they are in the tile."""
    # Clamped, because `gather` and `scatter` need valid columns for targets of other tiles as well.
    index = targets.unsqueeze(-1) - columns.start
    return index.clamp(0, width - 1), (index >= 0) & (index < width)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total`` in place, without a temporary result where their dtypes agree."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _multiplies_into_float32(left):
        # A product in half precision would be rounded once more for each chunk of tokens and each tile.
        total += _multiply_into_float32(left, right)
    else:
        total += left @ right


def log_sum_exp_(logits: Tensor) -> Tensor:
    """Return the ``[n, 1]`` log-sum-exp of ``[n, V]`` float32 or float64 logits, which may be overwritten.

    The softmax kernel reads the logits once, while log-sum-exp and exponential make several passes. The log-sum-exp
    follows from the largest logit and its probability.
    """
    # The largest probability is exp(largest - log_sum_exp), so log_sum_exp = largest - log(probability).
    largest = logits.amax(-1, keepdim=True)
    # On a CPU, in place: the tile stays in the cache. The softmax kernel of an accelerator needs another tensor.
    probability = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
    return largest - probability.amax(-1, keepdim=True).log()
