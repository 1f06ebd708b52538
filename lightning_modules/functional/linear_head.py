"""A head that is one matrix product: its logits can be made in tiles that never leave the processor's cache."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearHead(NamedTuple):
    """Maps ``[.., D]`` hidden states to ``[.., V]`` logits: ``cap(scale * (weight @ h + bias))``.

    A head like any other when called; who knows that it is linear can do with less memory and fewer products.

    Attributes:
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        scale: The logits are multiplied by it.
        soft_cap: The logits become ``tanh(logits / soft_cap) * soft_cap``, after the scale.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """``[.., V]`` logits."""
        logits = F.linear(hidden_states, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias of the product that gives the logits before the cap.

        The scale is in them, and under autocast they have the type that it would give them.
        """
        bias = self.bias
        if self.scale != 1.0:
            hidden_states, bias = hidden_states * self.scale, None if bias is None else bias * self.scale
        device = hidden_states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        return hidden_states.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype)


def logits_buffer(operand: Tensor, rows: int, columns: int) -> Tensor | None:
    """``[rows, columns]`` memory for logits that is used again and again; None where `wide_linear` makes its own."""
    return None if _widens(operand) else operand.new_empty(rows, columns)


def wide_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor | None) -> Tensor:
    """``[n, V]`` logits ``rows @ weight.T + bias``.

    Float32 where the device multiplies half-precision operands into it: a logit of 20 in bfloat16 is off by 0.06.

    Args:
        rows: ``[n, D]``.
        weight: ``[V, D]``, of the same type.
        bias: ``[V]``, or None.
        buffer: Of `logits_buffer`, at least ``[n, V]``: its first rows and columns are the result.
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


def tiled_log_likelihood(predictors: Tensor, head: LinearHead, targets: Tensor) -> Tensor:
    """Log-likelihoods by a running log-sum-exp over tiles of the vocabulary, without gradient.

    Writing logits to main memory and reading them again costs as much time as a fifth of the product itself.

    Args:
        predictors: ``[n, D]`` hidden states, n at least 1.
        head: The head.
        targets: ``[n]`` int64.

    Returns:
        ``[n]`` log-likelihoods in nats; float32, or float64 for float64 operands.
    """
    rows, weight, bias = head.operands(predictors)
    tile = max(1, _tile_elements(rows) // len(rows))
    buffer = logits_buffer(rows, len(rows), min(tile, len(weight)))
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_full((len(rows), 1), -torch.inf, dtype=wide)
    target_logit = torch.zeros_like(total)
    for start in range(0, len(weight), tile):
        piece = slice(start, start + tile)
        logits = wide_linear(rows, weight[piece], None if bias is None else bias[piece], buffer)
        if head.soft_cap is not None:
            logits.div_(head.soft_cap).tanh_().mul_(head.soft_cap)
        column = targets.unsqueeze(-1) - start
        inside = (column >= 0) & (column < logits.shape[1])
        logit = logits.gather(-1, column.clamp(0, logits.shape[1] - 1)).to(wide)
        target_logit = torch.where(inside, logit, target_logit)
        # A bias may be -inf, for tokens that do not exist, and a whole tile of them has no softmax.
        parts = logits.to(wide)
        tile_total = log_sum_exp_and_softmax(parts) if bias is None else parts.logsumexp(-1, keepdim=True)
        total = torch.logaddexp(total, tile_total)
        del logits, parts  # or the next tile's meet them
    return (target_logit - total).squeeze(-1)


def _tile_elements(operand: Tensor) -> int:
    return 2**21 if operand.device.type == "cpu" else 2**27


def log_sum_exp_and_softmax(logits: Tensor) -> Tensor:
    """``[n, 1]`` log-sum-exp of ``[n, V]`` logits of float32 or float64, which their softmax replaces.

    The kernel of softmax reads the logits once, where log-sum-exp and exponential take several passes. It keeps the
    sum to itself, but the largest probability tells it.
    """
    largest = logits.amax(-1, keepdim=True)
    if logits.device.type == "cpu":
        torch.softmax(logits, -1, out=logits)
    else:
        logits.copy_(logits.softmax(-1))
    return largest - logits.amax(-1, keepdim=True).log()
