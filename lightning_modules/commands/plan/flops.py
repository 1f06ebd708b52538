"""Floating point operations of training and scoring, ours and those of the code of the paper's authors.

A product with a weight takes two operations per weight and token. Attention takes two per width of query and value head
for each pair of tokens that it looks at, so causal attention half of all pairs. Its backward pass with flash attention
takes 2.5 times its forward pass: four products, and one computed again. Everything else is left out.

Checkpointing counts as a whole forward pass of the layers. torch stops it at the last tensor that the backward pass
needs, which in models like Llama saves the down projection: up to 4 % of a step, not taken off here.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import short_context_windows
from lightning_modules.functional.windows import check_context

Checkpointing = Literal["none", "full", "selective"]
"""What the backward pass computes again: nothing, all layers, or all layers but their attention."""

ATTENTION_BACKWARD = 2.5
"""Operations of the backward pass of flash attention for each of its forward pass."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations by what runs them.

    Attributes:
        gemm: Products with weights.
        attention: Attention, forward.
        attention_backward: Attention, backward.
    """

    gemm: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.gemm + self.attention + self.attention_backward

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.attention_backward + other.attention_backward,
        )

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.gemm * factor, self.attention * factor, self.attention_backward * factor)


def attention_pairs(tokens: int, window: int | None = None) -> float:
    """Pairs of a token and one it looks at, itself included, in a document.

    Example:
        >>> attention_pairs(4), attention_pairs(4, window=2)
        (10, 7)
    """
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def forward_flops(shape: ModelShape, tokens: int, scored: float) -> Flops:
    """A pass over one document that keeps nothing.

    Args:
        shape: The model.
        tokens: Length of the document.
        scored: Tokens whose logits are computed.
    """
    gemm = 2.0 * tokens * shape.layer_weights + 2.0 * scored * shape.head_weights
    return Flops(gemm, _attention(shape, tokens))


def short_pass_flops(
    shape: ModelShape,
    tokens: int,
    context_length: int,
    stride: int,
    *,
    candidate_share: float = 1.0,
) -> Flops:
    """Short contexts of one document as `short_context_windows` cuts them: the first window is left out.

    The last layer makes keys and values of all tokens, and does the rest of its products for those that are read.

    Args:
        shape: The model.
        tokens: Length of the document.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window, and the only ones of it whose logits are computed.
        candidate_share: Share of those tokens whose logits are needed.

    Raises:
        ValueError: If ``context_length`` or ``stride`` is below 1.
    """
    total = Flops()
    for start, first, stop in short_context_windows([0, tokens], context_length=context_length, stride=stride):
        length, scored = stop - start, (stop - first) * candidate_share
        total += forward_flops(shape, length, scored)
        unread = length - (stop - first) - 1
        total += Flops(-2.0 * unread * shape.tail_weights)
    return total


def ce_step_flops(shape: ModelShape, tokens: int, checkpointing: Checkpointing) -> Flops:
    """Cross entropy of one document, forward and backward, with a head that computes the logits once."""
    attention = _attention(shape, tokens)
    forwards = 1 if checkpointing == "none" else 2
    gemm = 2.0 * tokens * ((forwards + 1) * shape.layer_weights + shape.trained_layer_weights)
    gemm += 2.0 * (tokens - 1) * shape.head_weights * (3 if shape.head_trained else 2)
    kept = forwards if checkpointing != "selective" else 1
    return Flops(gemm, attention * kept, attention * ATTENTION_BACKWARD)


def longce_step_flops(
    shape: ModelShape,
    tokens: int,
    context_length: int,
    stride: int,
    checkpointing: Checkpointing,
    *,
    window_share: float = 1.0,
    stored_influence: bool = False,
) -> Flops:
    """LongCE of one document: cross entropy and the short contexts.

    Args:
        shape: The model.
        tokens: Length of the document.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        checkpointing: What the backward pass computes again.
        window_share: Share of the windows that are computed.
        stored_influence: Whether the weights of the tokens are known, so that no window is.
    """
    share = 0.0 if stored_influence else window_share
    return ce_step_flops(shape, tokens, checkpointing) + short_pass_flops(shape, tokens, context_length, stride) * share


def scoring_flops(
    evaluator: ModelShape,
    model: ModelShape,
    tokens: int,
    context_length: int,
    stride: int,
    *,
    shared_pass: bool = False,
) -> Flops:
    """LongPPL of one document: long and short contexts under the evaluator, long context under the model.

    Args:
        evaluator: Picks the key tokens.
        model: Is judged.
        tokens: Length of the document, with either tokenizer.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one window.
        shared_pass: Whether the model is the evaluator, so that its long context is computed once.
    """
    total = forward_flops(evaluator, tokens, tokens - 1)
    total += short_pass_flops(evaluator, tokens, context_length, stride)
    return total if shared_pass else total + forward_flops(model, tokens, tokens - 1)


def scoring_floor_flops(
    evaluator: ModelShape,
    model: ModelShape,
    tokens: int,
    context_length: int,
    stride: int,
    *,
    shared_pass: bool = False,
) -> Flops:
    """The least that an exact LongPPL takes: no logits of the evaluator and no attention of its last layer unread."""
    total = forward_flops(model, tokens, tokens - 1) + short_pass_flops(evaluator, tokens, context_length, stride)
    if not shared_pass:
        total += forward_flops(evaluator, tokens, tokens - context_length - stride)
    for start, first, _ in short_context_windows([0, tokens], context_length=context_length, stride=stride):
        total += Flops(attention=-_per_pair(evaluator) * attention_pairs(first - start - 1, evaluator.windows[-1]))
    return total


# ---------------------------------------------------------------------------------------------------- the authors' code


def authors_short_pass_flops(shape: ModelShape, tokens: int, context_length: int, stride: int) -> Flops:
    """Short contexts of one document as in the authors' package: the first window, too, and logits of all tokens."""
    check_context(context_length, stride)
    total = Flops()
    for start in range(0, tokens - context_length, stride):
        length = min(start + context_length + stride, tokens) - start
        total += forward_flops(shape, length, length)
    return total


def authors_scoring_flops(
    evaluator: ModelShape, model: ModelShape, tokens: int, context_length: int, stride: int
) -> Flops:
    """LongPPL of one document as in the authors' package, which never shares a pass."""
    short = authors_short_pass_flops(evaluator, tokens, context_length, stride)
    return forward_flops(evaluator, tokens, tokens) + short + forward_flops(model, tokens, tokens)


def _attention(shape: ModelShape, tokens: int) -> float:
    return _per_pair(shape) * math.fsum(attention_pairs(tokens, window) for window in shape.windows)


def _per_pair(shape: ModelShape) -> float:
    """Operations of one layer for a pair of tokens."""
    return 2.0 * shape.heads * (shape.query_size + shape.value_size)
