"""Bits per byte of a text and of its key spans: numbers that models with different tokenizers share."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_modules.functional.alignment import span_token_mask

_WIDTHS = (0x80, 0x800, 0x10000)
"""Code points at which UTF-8 starts to use another byte."""


class TextBits(NamedTuple):
    """Sums over documents; `numbers` returns their quotients.

    Attributes:
        bits: Negative log-likelihood of all scored tokens, in bits.
        bytes: UTF-8 bytes of the text, from the first scored token on, without those of tokens that are not scored.
        key_bits: Negative log-likelihood of the tokens in key spans, in bits. A token that crosses the border of a span
            counts by the fraction of its bytes inside.
        crossing_bits: Maximum error of ``key_bits``, because the bits of each byte of a token are unknown.
        key_bytes: UTF-8 bytes of the key spans, without those of tokens that are not scored.
        evaluator_key_tokens: Tokens of the evaluator in the key spans that have such bytes; 0 if unknown.
    """

    bits: float = 0.0
    bytes: int = 0
    key_bits: float = 0.0
    crossing_bits: float = 0.0
    key_bytes: int = 0
    evaluator_key_tokens: int = 0

    def numbers(self) -> dict[str, float]:
        """Return the numbers by their names in results, with NaN for a division by zero.

        ``bits_per_byte`` is that of lm-evaluation-harness. ``key_bits_per_byte`` is the same over the key spans.
        ``longppl_per_evaluator_token`` spreads their bits over the evaluator's key tokens; for a model with the
        evaluator's tokens it is LongPPL, apart from tokens that share a character.
        """
        per_token = _divide(self.key_bits, self.evaluator_key_tokens)
        return {
            "key_bits_per_byte": _divide(self.key_bits, self.key_bytes),
            "bits_per_byte": _divide(self.bits, self.bytes),
            "longppl_per_evaluator_token": float(torch.tensor(per_token, dtype=torch.float64).exp2()),  # may be inf
        }


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def text_bits(
    text: str,
    log_likelihood: Tensor,
    offsets: Tensor,
    scored: Tensor,
    spans: Tensor,
    evaluator_offsets: Tensor | None = None,
) -> TextBits:
    """Measure a document in bits and bytes.

    Args:
        text: The document.
        log_likelihood: ``[N]`` log-likelihoods of its tokens, in nats.
        offsets: ``[N, 2]`` character span of each token.
        scored: ``[N]`` bool, the tokens that have a log-likelihood.
        spans: ``[M, 2]`` key spans, in characters; they may overlap or exceed the text.
        evaluator_offsets: ``[E, 2]`` character span of each token of the evaluator.

    Example:
        >>> one_bit, offsets = torch.full((3,), 0.5).log(), torch.tensor([[0, 1], [1, 3], [3, 4]])
        >>> found = text_bits("a éb", one_bit, offsets, torch.tensor([False, True, True]), torch.tensor([[2, 4]]))
        >>> round(found.key_bits, 3), round(found.crossing_bits, 3), found.key_bytes, found.bytes
        (1.667, 0.667, 3, 4)
    """
    # 1. Find the number of UTF-8 bytes of each character from its code point (1 to 4).
    points = torch.from_numpy(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64))
    widths = 1 + torch.stack([points >= first for first in _WIDTHS]).sum(0)
    # 2. Leave out characters without bits: those before the first scored token, and those of other tokens that are not
    #    scored, such as the prompts of a chat.
    start, end = offsets.long().unbind(-1)
    read = start[scored & (end > start)]
    counts = _is_covered(offsets[scored], len(text)) | ~_is_covered(offsets[~scored], len(text))
    counts[: int(read.min()) if len(read) else len(text)] = False
    widths = widths * counts
    in_span = _is_covered(spans, len(text))
    # 3. Sum up the bytes before each character, of the text and of the key spans alone.
    zero = widths.new_zeros(1)
    before = torch.cat([zero, widths.cumsum(0)])
    key_before = torch.cat([zero, (widths * in_span).cumsum(0)])
    # 4. Each token's share of bytes inside the spans; none for a special token, which has no characters.
    size = before[end] - before[start]
    inside = key_before[end] - key_before[start]
    share = (inside / size.clamp(min=1)).double()
    # 5. Sum over tokens. How a token's bits are divided among its bytes is unknown: if all of them were on one side of
    #    the border of a span, the share would be off by its larger part.
    bits = torch.where(scored, -log_likelihood.double() / math.log(2), 0.0)
    crossing = torch.where((share > 0) & (share < 1), torch.maximum(share, 1 - share), 0.0)
    evaluator_key_tokens = 0
    if evaluator_offsets is not None:
        first, stop = evaluator_offsets.long().unbind(-1)
        has_bytes = before[stop] > before[first]
        evaluator_key_tokens = int((span_token_mask(evaluator_offsets, spans) & has_bytes).sum())
    return TextBits(
        bits=float(bits.sum()),
        bytes=int(before[-1]),
        key_bits=float((bits * share).sum()),
        crossing_bits=float((bits * crossing).sum()),
        key_bytes=int(key_before[-1]),
        evaluator_key_tokens=evaluator_key_tokens,
    )


def _is_covered(spans: Tensor, length: int) -> Tensor:
    """Return which of ``[length]`` characters are in one of the ``[M, 2]`` spans, which may overlap or exceed them."""
    # The number of spans of a character: 1 more from the start of a span on, 1 less from its end on.
    change = torch.zeros(length + 1, dtype=torch.int64)
    change.index_add_(0, spans.flatten().long().clamp(max=length), torch.tensor([1, -1]).repeat(len(spans)))
    return change.cumsum(0)[:-1] > 0


def add_bits(documents: Iterable[TextBits]) -> TextBits:
    """Add up the sums of documents."""
    return TextBits(*map(sum, zip(TextBits(), *documents, strict=True)))
