"""Attention patterns for long texts, each a function of one document; see `PATTERNS`."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from lightning_modules.models.context_extension.patterns.blocks import Rotary
from lightning_modules.models.context_extension.patterns.relocation import (
    Relocation,
    dual_chunk,
    lm_infinite,
    relocated_attention,
    rerope,
    self_extend,
    streaming_llm,
)
from lightning_modules.models.context_extension.patterns.trained import alibi, longnet, xpos

Pattern = Callable[[Tensor, Tensor, Tensor, Rotary], Tensor]
"""``[B, H, T, D]`` queries of the last T of S tokens, ``[B, H_kv, S, D]`` keys and values; ``[B, H, T, D]`` output."""


def _relocated(pattern: Callable[..., Relocation], query: Tensor, key: Tensor, value: Tensor, rotary: Rotary) -> Tensor:
    return relocated_attention(pattern(rotary.parameters), query, key, value, rotary)


PATTERNS: dict[str, Pattern] = {
    "streaming_llm": partial(_relocated, streaming_llm),
    "lm_infinite": partial(_relocated, lm_infinite),
    "rerope": partial(_relocated, rerope),
    "self_extend": partial(_relocated, self_extend),
    "dual_chunk": partial(_relocated, dual_chunk),
    "alibi": alibi,
    "xpos": xpos,
    "longnet": longnet,
}
"""By the name of their RoPE type."""

__all__ = ["PATTERNS", "Pattern", "Rotary"]
