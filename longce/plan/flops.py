"""Floating-point operations of training and scoring.

A product with a weight takes two operations per weight and token. Attention takes two per width of query and value head
for each pair of tokens that it looks at, so causal attention half of all pairs. Its backward pass with flash attention
takes 2.5 times its forward pass: four products, and one computed again. Everything else is left out.

Checkpointing counts as a whole forward pass of the layers. torch stops it at the last tensor that the backward pass
needs, which in models like Llama saves the down projection: up to 4 % of a step, not subtracted here.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_modules.functional import ShortContext, short_context_windows
from longce.plan.shapes import ModelShape

Checkpointing = Literal["none", "full", "selective"]
"""Recomputation in the backward pass: nothing, all layers, or all layers except their attention."""

ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward pass, relative to its forward pass."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations: products with weights, attention forward, and attention backward."""

    gemm: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0

    @property
    def total(self) -> float:
        """Total FLOPs."""
        return self.gemm + self.attention + self.attention_backward

    def __add__(self, other: "Flops") -> "Flops":
        backward = self.attention_backward + other.attention_backward
        return Flops(self.gemm + other.gemm, self.attention + other.attention, backward)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.gemm * factor, self.attention * factor, self.attention_backward * factor)


def attention_pairs(tokens: int, window: int | None = None) -> float:
    """Count the pairs of a token and a token that it attends to, including itself, in a document.

    Example:
        >>> attention_pairs(4), attention_pairs(4, window=2)
        (10, 7)
    """
    window = min(window or tokens, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def forward_flops(shape: ModelShape, tokens: int, scored: float) -> Flops:
    """Count a pass without gradient over one document that computes the logits of ``scored`` tokens."""
    gemm = 2.0 * tokens * shape.layer_weights + 2.0 * scored * shape.head_weights
    return Flops(gemm, _attention_flops(shape, tokens))


def short_pass_flops(shape: ModelShape, tokens: int, short_context: ShortContext) -> Flops:
    """Count the short contexts of one document as `short_context_windows` cuts them."""
    total = Flops()
    for start, first, stop in short_context_windows([0, tokens], short_context):
        total += forward_flops(shape, stop - start, stop - first)
    return total


def sliding_pass_flops(shape: ModelShape, tokens: int, context_length: int) -> Flops:
    """Count the approximate short contexts of one document: one pass in which layers attend to K tokens only."""
    windows = tuple(min(window or context_length, context_length) for window in shape.windows)
    return forward_flops(replace(shape, windows=windows), tokens, tokens - 1)


def ce_step_flops(shape: ModelShape, tokens: int, checkpointing: Checkpointing, layers: int | None = None) -> Flops:
    """Count cross entropy of one document, forward and backward; the backward pass recomputes the logits.

    It also recomputes the first ``layers`` layers, by default all, unless ``checkpointing`` is ``none``.
    """
    attention = _attention_flops(shape, tokens)
    recomputed = shape.layers if layers is None else layers
    gemm = attention_again = 0.0
    if checkpointing != "none":
        gemm = 2.0 * tokens * shape.layer_weights * recomputed / shape.layers
    if checkpointing == "full":
        attention_again = _attention_flops(replace(shape, windows=shape.windows[:recomputed]), tokens)
    again = Flops(gemm + _logit_flops(shape, tokens), attention_again, attention * (ATTENTION_BACKWARD - 2))
    return necessary_flops(shape, tokens) + again


def necessary_flops(shape: ModelShape, tokens: int) -> Flops:
    """Count cross entropy of one document for model FLOPs utilization, without recomputation."""
    attention = _attention_flops(shape, tokens)
    gemm = 2.0 * tokens * (2 * shape.layer_weights + shape.trained_layer_weights)
    products = 2  # logits and gradient of the hidden states
    if shape.head_trained:
        products = 3  # and gradient of the head
    gemm += _logit_flops(shape, tokens) * products
    return Flops(gemm, attention, attention * 2)


def scoring_flops(
    evaluator: ModelShape,
    model: ModelShape,
    tokens: int,
    short_context: ShortContext,
    *,
    shared_pass: bool = False,
) -> Flops:
    """Count LongPPL of one document: long and short contexts under the evaluator, long context under the model.

    With ``shared_pass`` the model is the evaluator, and its long context is computed once.
    """
    total = forward_flops(evaluator, tokens, tokens - 1)
    total += short_pass_flops(evaluator, tokens, short_context)
    if not shared_pass:
        total += forward_flops(model, tokens, tokens - 1)
    return total


def _logit_flops(shape: ModelShape, tokens: int) -> float:
    return 2.0 * (tokens - 1) * shape.head_weights


def _attention_flops(shape: ModelShape, tokens: int) -> float:
    return shape.pair_flops * math.fsum(attention_pairs(tokens, window) for window in shape.windows)
