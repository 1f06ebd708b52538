"""Entropy-aware ABF: a higher RoPE base, and attention logits that grow with the position beyond the original length.

The method of Zhang et al. (2024, https://arxiv.org/abs/2401.07004), by which the LongCE paper extends its models. Its
scaling depends on layer and position, so that neither cos and sin (one pair for all layers, for queries and keys) nor a
hook on a projection (fused, normalised or adapted in some models) can express it. Here it is a RoPE type, ``eabf``,
which a saved config carries, and a wrapper around the attention functions of transformers, which does nothing for
models of other RoPE types. Where `register_eabf` was not called, such a model does not load: ``KeyError: 'eabf'``.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_modules.attention import DOCUMENT_SDPA, register_document_attention

EABF = "eabf"
"""The value of ``rope_parameters.rope_type``."""

EABF_ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gpt_neox")
"""Model types whose attention hands positions on; tests compare each with a dense reference."""

BACKENDS = ("sdpa", DOCUMENT_SDPA, "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations that are wrapped."""


def entropy_scale(positions: Tensor, original_length: int) -> Tensor:
    r"""What EABF multiplies the attention logits of each query by.

    .. math:: t_i = \max\big(1,\ \log(i + 1) / \log c\big)

    for a query at position :math:`i` counted from 0 and a model pre-trained on :math:`c` tokens.

    Args:
        positions: Integer positions of any shape.
        original_length: Length c of the pre-training rows, in tokens.

    Returns:
        float32 scales of that shape; exactly 1 for positions below ``original_length``.

    Example:
        >>> entropy_scale(torch.tensor([0, 4095, 32767]), 4096)
        tensor([1.0000, 1.0000, 1.2500])
    """
    # float32 whatever the default dtype: bfloat16 has 33 values between 1 and 1.25.
    scale = (positions.to(torch.float32) + 1).log() / math.log(original_length)
    return torch.where(positions < original_length, torch.ones_like(scale), scale)


class EntropyAwareAttention:
    """An attention function of transformers that scales the queries of models of RoPE type ``eabf``.

    Args:
        attention: What computes attention.
    """

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attention of ``[B, H, T, D]`` queries, of which those beyond the original length are scaled.

        Raises:
            ValueError: If a model of type ``eabf`` gives no positions.
        """
        rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        if rope.get("rope_type") == EABF and module.layer_idx >= rope["unscaled_layers"]:
            positions = kwargs.get("position_ids")
            if positions is None:
                raise ValueError(
                    f"`{type(module).__name__}` gives attention no positions, by which EABF scales it: extend this"
                    " model by another method, such as 'abf'."
                )
            scale = entropy_scale(positions, rope["original_max_position_embeddings"])[:, None, :, None]
            query = (query * scale).to(query.dtype)  # promoted to float32 and rounded once
        return self.attention(module, query, *args, **kwargs)


def register_eabf() -> None:
    """Make models of RoPE type ``eabf`` load and compute; others are not touched. Call it as often as you like."""
    ROPE_INIT_FUNCTIONS[EABF] = _inverse_frequencies
    register_document_attention()
    attention_functions = AttentionInterface()
    for name in BACKENDS:
        attention = attention_functions.get(name)
        if attention is not None and not isinstance(attention, EntropyAwareAttention):
            AttentionInterface.register(name, EntropyAwareAttention(attention))


def check_eabf(model: PreTrainedModel) -> None:
    """Raise a ``RuntimeError`` if a model of RoPE type ``eabf`` would compute attention without the scaling."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != EABF:
        return
    name = model.config._attn_implementation
    if not isinstance(AttentionInterface().get(name), EntropyAwareAttention):
        raise RuntimeError(
            f"The attention implementation '{name}' knows nothing of the scaling that the model's RoPE type '{EABF}'"
            f" asks for: use one of {', '.join(BACKENDS)}."
        )


def _inverse_frequencies(
    config: PreTrainedConfig, device: torch.device | None = None, seq_len: int | None = None, **_: Any
) -> tuple[Tensor, float]:
    """Those of plain RoPE at the base in the config, as transformers asks for them when it builds a model."""
    if config._attn_implementation == "eager":
        raise ValueError(
            "EABF scales attention where transformers' 'eager' attention cannot be reached: set"
            " `attn_implementation` to 'sdpa', 'flex_attention' or 'flash_attention_2'."
        )
    if config.model_type not in EABF_ARCHITECTURES:
        raise ValueError(
            f"EABF is not known to work for models of type '{config.model_type}', only for"
            f" {', '.join(EABF_ARCHITECTURES)}: others may hand no positions to attention or never call it."
        )
    width = rotary_width(config)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(device=device, dtype=torch.float32) / width
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def rotary_width(config: PreTrainedConfig) -> int:
    """How many components of each attention head are rotated."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))
