"""Entropy-aware ABF (EABF): a higher RoPE base, and attention logits scaled up beyond the original length.

Zhang et al. (2024), https://arxiv.org/abs/2401.07004. The LongCE paper extends its models with this method.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.models.context_extension.frequencies import layer_parameters

EABF = "eabf"
"""Value of ``rope_parameters.rope_type``."""


def entropy_scale(positions: Tensor, original_length: int) -> Tensor:
    r"""Return the factor of the attention logits of each query.

    .. math:: t_i = \max\big(1,\ \log(i + 1) / \log c\big)

    for a query at position :math:`i` counted from 0 and a model pre-trained on :math:`c` tokens.

    Args:
        positions: Integer positions of any shape.
        original_length: Length c of the pre-training sequences, in tokens.

    Returns:
        float32 scales of the same shape; exactly 1 for positions below ``original_length``.

    Example:
        >>> entropy_scale(torch.tensor([0, 4095, 32767]), 4096)
        tensor([1.0000, 1.0000, 1.2500])
    """
    # float32 whatever the default dtype: bfloat16 has 33 values between 1 and 1.25.
    # t_i = log(i + 1) / log(c): positions count from 0, the paper's from 1.
    scale = (positions.to(torch.float32) + 1).log() / math.log(original_length)
    # Not `clamp`: rounding can put the quotient a little above 1 below the original length.
    return torch.where(positions < original_length, torch.ones_like(scale), scale)


def scaled_attention(attention: Callable[..., Any], module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute attention with ``[B, H, T, D]`` queries that are scaled beyond the original length.

    ``attention`` is the attention function of transformers, and the others are its arguments, with ``position_ids``.
    """
    config: Any = module.config
    rope = layer_parameters(config, module.layer_idx)
    # The paper leaves the first two layers as they are; the released code scales all.
    if module.layer_idx >= rope["unscaled_layers"]:
        positions = kwargs["position_ids"]
        window = kwargs.get("attention_window")
        if window is not None:
            positions = positions.clamp(max=window - 1)  # as in a document of this length
        # ``[B, T]`` to ``[B, 1, T, 1]``. Scaling queries scales all their logits.
        scale = entropy_scale(positions, rope["original_max_position_embeddings"])[:, None, :, None]
        query = (query * scale).to(query.dtype)  # promoted to float32 and rounded once
    return attention(module, query, *args, **kwargs)
