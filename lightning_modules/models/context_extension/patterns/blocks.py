"""Causal attention for one block of queries at a time, with logits from a pattern.

No tensor has the size of a sequence squared, not even in the backward pass, which recomputes the logits of each block.
Logits are rounded to the dtype of queries and keys, as in the ``eager`` attention of transformers, and softmax is
computed in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BLOCK, SMALLEST_BLOCK = 256, 64
"""Number of queries in a block; 256 was faster than 1024 on a CPU."""

BLOCK_LOGITS = 1 << 26
"""Largest number of logits in a block, unless it already has the smallest number of queries."""

Take = Callable[[int, int, int], Tensor]
"""Returns a range of tokens of a state, given its index; blocks access their inputs through it."""


@dataclass(frozen=True)
class Rotary:
    """Model settings that a pattern needs in addition to queries, keys and values."""

    parameters: Mapping[str, Any]  # the rope_parameters of its config
    frequencies: Tensor  # [R / 2] inverse frequencies, float32, on the device of the queries
    scaling: float  # factor of the products of queries and keys
    dropout: float = 0.0  # fraction of the attention weights that are dropped
    attention_factor: float = 1.0  # factor of cos and sin

    def rotate_queries(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``[.., T, D]`` queries to ``[T]`` positions, and multiply them by the factor of the products."""
        return self._rotate(states, positions, self.scaling)

    def rotate_keys(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``[.., T, D]`` keys, or unscaled queries, to ``[T]`` positions."""
        return self._rotate(states, positions, 1.0)

    def _rotate(self, states: Tensor, positions: Tensor, scale: float) -> Tensor:
        # In float32, rounded once. Component c rotates with c + R / 2; components from R on only get the scale.
        half = len(self.frequencies)
        angles = positions[..., None].to(torch.float32) * self.frequencies
        cos = angles.cos() * (scale * self.attention_factor)
        sin = angles.sin() * (scale * self.attention_factor)
        first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, rest * scale)
        return torch.cat([components.to(states.dtype) for components in rotated], dim=-1)


def grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[B, H, N, X]`` by ``[B, H_kv, X, Y]``, shared by ``H / H_kv`` heads, without copies."""
    batch, heads, rows, inner = left.shape
    return (left.reshape(batch, right.shape[1], -1, inner) @ right).view(batch, heads, rows, -1)


def attention_logits(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """Return ``[B, H, N, M]`` float32 products of scaled queries and keys, ``-inf`` where not ``visible``."""
    return grouped_matmul(query, key.mT).float().masked_fill_(~visible, -torch.inf)


def joint_attention(logits: Sequence[Tensor], values: Sequence[Tensor], kept: Tensor | None = None) -> Tensor:
    """Compute ``[B, H, N, D]`` attention with one softmax over several sets of keys.

    Each set has ``[B, H, N, M]`` float32 logits and ``[B, H_kv, M, D]`` values, and each query sees a key of some set.
    Weights are multiplied by ``kept``, for dropout.
    """
    weights = (torch.cat(list(logits), dim=-1) if len(logits) > 1 else logits[0]).softmax(-1)
    if kept is not None:
        weights = weights * kept
    value = torch.cat(list(values), dim=2)
    return grouped_matmul(weights.to(value.dtype), value)


def block_size(heads: int, keys: int) -> int:
    """Return the number of queries in a block."""
    return max(SMALLEST_BLOCK, min(MAX_BLOCK, BLOCK_LOGITS // (heads * keys)))


@dataclass(frozen=True)
class Blocks:
    """Attention in blocks of queries."""

    # From `Take` and a range of queries to the logits and values of each set of keys.
    score: Callable[[Take, int, int], tuple[list[Tensor], list[Tensor]]]
    start: int  # position of the first query
    stop: int  # position after the last one
    size: int  # queries in a block
    align: int = 1 << 62  # no block holds positions on both sides of a multiple of this
    dropout: float = 0.0  # fraction of the attention weights that are dropped

    def attend(self, *states: Tensor) -> Tensor:
        """Compute ``[B, H, stop - start, D]`` attention; `score` takes ranges of the ``[B, .., T, D]`` states."""
        seed = int(torch.randint(1 << 62, ())) if self.dropout > 0 else 0
        return _Attention.apply(self, seed, *states)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the range of positions of each block."""
        start = self.start
        while start < self.stop:
            stop = min(start + self.size, (start // self.align + 1) * self.align, self.stop)
            yield start, stop
            start = stop

    def block(self, take: Take, start: int, stop: int, seed: int) -> Tensor:
        """Compute ``[B, H, stop - start, D]`` attention of one block, with dropout determined by the seed."""
        logits, values = self.score(take, start, stop)
        if self.dropout == 0:
            return joint_attention(logits, values)
        generator = torch.Generator(logits[0].device).manual_seed(seed + start)
        shape = (*logits[0].shape[:-1], sum(of_set.shape[-1] for of_set in logits))
        drawn = torch.rand(shape, generator=generator, device=logits[0].device)
        return joint_attention(logits, values, (drawn >= self.dropout) / (1 - self.dropout))


class _Attention(torch.autograd.Function):
    """Attention of all blocks. The backward pass recomputes each block and adds to the gradients of the ranges it used.

    Checkpointing and slicing would do the same, but the gradient of each slice would be as large as the whole tensor.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, seed: int, *states: Tensor) -> Tensor:
        device = states[0].device.type
        ctx.blocks = blocks
        ctx.seed = seed
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        ctx.save_for_backward(*states)

        def take(number: int, start: int, stop: int) -> Tensor:
            return states[number][:, :, start:stop]

        return torch.cat([blocks.block(take, start, stop, seed) for start, stop in blocks.ranges()], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states = ctx.saved_tensors
        blocks = ctx.blocks
        sums = [torch.zeros_like(state) for state in states]
        for start, stop in blocks.ranges():
            taken: list[tuple[int, int, int, Tensor]] = []

            def take(number: int, start: int, stop: int, taken: list[Any] = taken) -> Tensor:
                taken.append((number, start, stop, states[number][:, :, start:stop].detach().requires_grad_()))
                return taken[-1][-1]

            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                output = blocks.block(take, start, stop, ctx.seed)
            grad_output = gradients[0][:, :, start - blocks.start : stop - blocks.start]
            grads = torch.autograd.grad(output, [states_range[-1] for states_range in taken], grad_output)
            for (number, first, last, _), grad in zip(taken, grads, strict=True):
                sums[number][:, :, first:last] += grad
        return None, None, *sums
