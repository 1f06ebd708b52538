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
"""Attention of ``[B, H, T, D]`` queries (the last T of S tokens) and ``[B, H_kv, S, D]`` keys and values."""


def _attend_relocated(
    pattern: Callable[..., Relocation], query: Tensor, key: Tensor, value: Tensor, rotary: Rotary
) -> Tensor:
    return relocated_attention(pattern(rotary.parameters), query, key, value, rotary)


PATTERNS: dict[str, Pattern] = {
    "streaming_llm": partial(_attend_relocated, streaming_llm),
    "lm_infinite": partial(_attend_relocated, lm_infinite),
    "rerope": partial(_attend_relocated, rerope),
    "self_extend": partial(_attend_relocated, self_extend),
    "dual_chunk": partial(_attend_relocated, dual_chunk),
    "alibi": alibi,
    "xpos": xpos,
    "longnet": longnet,
}
"""Patterns by the name of their RoPE type."""

__all__ = ["PATTERNS", "Pattern", "Rotary"]
