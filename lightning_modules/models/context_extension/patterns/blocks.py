"""Causal attention one block of queries at a time, with logits from a pattern.

No tensor has the size of a whole row by a whole row, not even in the backward pass, which computes the logits of each
block again. Logits are rounded to the type of queries and keys, as in transformers' own ``eager`` attention, and
softmax is taken in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BLOCK, SMALLEST_BLOCK = 256, 64
"""Queries in a block; 256 was the fastest of 256 and 1024 on a CPU."""

BLOCK_LOGITS = 1 << 26
"""Logits of a block that are not exceeded unless the block is the smallest one already."""

Take = Callable[[int, int, int], Tensor]
"""From the number of a tensor and a range of tokens to that part of it, by which a block accesses its tensors."""


@dataclass(frozen=True)
class Rotary:
    """Settings of a model that a pattern needs in addition to queries, keys and values."""

    parameters: Mapping[str, Any]  # the rope_parameters of its config
    frequencies: Tensor  # [R / 2] inverse frequencies, float32, on the device of the queries
    scaling: float  # what products of queries and keys are multiplied by
    dropout: float = 0.0  # fraction of the attention weights that are dropped


def rotate(states: Tensor, positions: Tensor, frequencies: Tensor, *, scale: float = 1.0) -> Tensor:
    """Rotate ``[.., T, D]`` states to ``[T]`` positions by ``[R / 2]`` frequencies, in float32, rounded once.

    Component ``c`` rotates with ``c + R / 2``; components from R on only get the scale.
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


def joint_attention(logits: Sequence[Tensor], values: Sequence[Tensor], kept: Tensor | None = None) -> Tensor:
    """Return ``[B, H, N, D]`` attention by one softmax over several sets of keys.

    Each set has ``[B, H, N, M]`` float32 logits and ``[B, H_kv, M, D]`` values, and each query sees a key of some set.
    Weights are multiplied by ``kept``, for dropout.
    """
    weights = (torch.cat(list(logits), dim=-1) if len(logits) > 1 else logits[0]).softmax(-1)
    if kept is not None:
        weights = weights * kept
    value = torch.cat(list(values), dim=2)
    return grouped_matmul(weights.to(value.dtype), value)


def block_size(heads: int, keys: int) -> int:
    """Return how many queries share a block."""
    return max(SMALLEST_BLOCK, min(MAX_BLOCK, BLOCK_LOGITS // (heads * keys)))


@dataclass(frozen=True)
class Blocks:
    """Attention in blocks."""

    # From `Take` and a range of queries to the logits and values of each set of keys.
    score: Callable[[Take, int, int], tuple[list[Tensor], list[Tensor]]]
    start: int  # position of the first query
    stop: int  # position after the last one
    size: int  # queries in a block
    align: int = 1 << 62  # no block holds positions on both sides of a multiple of this
    dropout: float = 0.0  # fraction of the attention weights that are dropped

    def attend(self, *states: Tensor) -> Tensor:
        """``[B, H, stop - start, D]`` attention with `score` taking parts of the ``[B, .., T, D]`` states."""
        seed = int(torch.randint(1 << 62, ())) if self.dropout > 0 else 0
        return _Attention.apply(self, seed, *states)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first position of each block and the one after its last."""
        start = self.start
        while start < self.stop:
            stop = min(start + self.size, (start // self.align + 1) * self.align, self.stop)
            yield start, stop
            start = stop

    def block(self, take: Take, start: int, stop: int, seed: int) -> Tensor:
        """``[B, H, stop - start, D]`` attention of one block, the same for the same seed."""
        logits, values = self.score(take, start, stop)
        if self.dropout == 0:
            return joint_attention(logits, values)
        generator = torch.Generator(logits[0].device).manual_seed(seed + start)
        shape = (*logits[0].shape[:-1], sum(part.shape[-1] for part in logits))
        drawn = torch.rand(shape, generator=generator, device=logits[0].device)
        return joint_attention(logits, values, (drawn >= self.dropout) / (1 - self.dropout))


class _Attention(torch.autograd.Function):
    """All blocks, each computed again for its gradient, which goes right to the part of the states that it used.

    Checkpointing and slices would do the same, but the gradient of each slice would be as large as the whole.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, seed: int, *states: Tensor) -> Tensor:
        device = states[0].device.type
        ctx.blocks, ctx.seed = blocks, seed
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        ctx.save_for_backward(*states)

        def take(number: int, start: int, stop: int) -> Tensor:
            return states[number][:, :, start:stop]

        return torch.cat([blocks.block(take, start, stop, seed) for start, stop in blocks.ranges()], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, blocks = ctx.saved_tensors, ctx.blocks
        sums = [torch.zeros_like(state) for state in states]
        for start, stop in blocks.ranges():
            taken: list[tuple[int, int, int, Tensor]] = []

            def take(number: int, start: int, stop: int, taken: list[Any] = taken) -> Tensor:
                taken.append((number, start, stop, states[number][:, :, start:stop].detach().requires_grad_()))
                return taken[-1][-1]

            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                output = blocks.block(take, start, stop, ctx.seed)
            own = gradients[0][:, :, start - blocks.start : stop - blocks.start]
            parts = torch.autograd.grad(output, [part[-1] for part in taken], own)
            for (number, first, last, _), part in zip(taken, parts, strict=True):
                sums[number][:, :, first:last] += part
        return None, None, *sums
