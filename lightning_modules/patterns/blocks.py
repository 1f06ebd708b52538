"""Causal attention one block of queries at a time, with logits that a pattern makes as it likes.

Nothing of the size of a whole row by a whole row ever exists, in the backward pass neither: it makes the logits of each
block again. Logits are rounded to the type of queries and keys, as in transformers' own ``eager`` attention, and
softmax is taken in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
"""Queries in a block; 256 was the fastest of 256 and 1024 on a CPU."""

BLOCK_LOGITS = 1 << 26
"""Logits of a block that are not exceeded unless the block is the smallest one already."""

Attend = Callable[[int, int], Tensor]
"""From a range of positions to the ``[B, H, stop - start, D]`` output of attention for the queries there."""


@dataclass(frozen=True)
class Rotary:
    """What a pattern needs to know of a model besides queries, keys and values.

    Attributes:
        parameters: The ``rope_parameters`` of its config.
        frequencies: ``[R / 2]`` inverse frequencies, float32, on the device of the queries.
        scaling: What products of queries and keys are multiplied by.
        dropout: Share of the attention weights that are dropped.
    """

    parameters: Mapping[str, Any]
    frequencies: Tensor
    scaling: float
    dropout: float = 0.0


def rotate(states: Tensor, positions: Tensor, frequencies: Tensor, *, scale: float = 1.0) -> Tensor:
    """Rotate queries or keys, which no one has rotated yet, to their positions; in float32, rounded once.

    Args:
        states: ``[.., T, D]``, whose first R components are rotated, component ``c`` with ``c + R / 2``.
        positions: ``[T]`` or whatever else stands before the last dimension.
        frequencies: ``[R / 2]`` angles by which one position turns.
        scale: Factor of the result.

    Returns:
        Of the shape and type of ``states``.
    """
    half = len(frequencies)
    angles = positions[..., None].to(torch.float32) * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin, rest * scale)
    return torch.cat([part.to(states.dtype) for part in parts], dim=-1)


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """``[B, H, N, X]`` times ``[B, H_kv, X, Y]``, each of whose matrices serves ``H / H_kv`` heads, without copies."""
    batch, heads, rows, inner = left.shape
    return (left.reshape(batch, right.shape[1], -1, inner) @ right).view(batch, heads, rows, -1)


def attention_logits(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """``[B, H, N, M]`` float32 products of scaled queries and keys, and ``-inf`` for pairs that are not ``visible``."""
    return grouped_matmul(query, key.mT).float().masked_fill_(~visible, -torch.inf)


def joint_attention(logits: Sequence[Tensor], values: Sequence[Tensor], dropout: float = 0.0) -> Tensor:
    """One softmax over several sets of keys.

    Args:
        logits: For each set ``[B, H, N, M]`` float32; each query sees a key of one of the sets at least.
        values: For each set ``[B, H_kv, M, D]``.
        dropout: Share of the weights that are dropped.

    Returns:
        ``[B, H, N, D]``.
    """
    weights = (torch.cat(list(logits), dim=-1) if len(logits) > 1 else logits[0]).softmax(-1)
    if dropout > 0:
        weights = torch.nn.functional.dropout(weights, dropout)
    value = torch.cat(list(values), dim=2)
    return grouped_matmul(weights.to(value.dtype), value)


def block_size(heads: int, keys: int) -> int:
    """How many queries share a block."""
    return max(SMALLEST_BLOCK, min(LARGEST_BLOCK, BLOCK_LOGITS // (heads * keys)))


def in_blocks(
    attend: Attend, start: int, stop: int, size: int, *, align: int = 1 << 62, dropout: float = 0.0
) -> Tensor:
    """Attention of the queries at positions ``start`` to ``stop``, whose blocks are computed again for the gradient.

    Args:
        attend: Computes one block.
        start: Position of the first query.
        stop: Position behind the last one.
        size: Queries in a block.
        align: No block holds positions on both sides of a multiple of this.
        dropout: Whether random numbers must be the same the second time.

    Returns:
        ``[B, H, stop - start, D]``.
    """
    outputs = []
    while start < stop:
        end = min(start + size, (start // align + 1) * align, stop)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend, start, end, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            outputs.append(attend(start, end))
        start = end
    return torch.cat(outputs, dim=2)
