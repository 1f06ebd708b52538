"""Entropy-aware ABF: a higher RoPE base, and attention logits that grow with the position beyond the original length.

The method of Zhang et al. (2024, https://arxiv.org/abs/2401.07004), by which the LongCE paper extends its models.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EABF = "eabf"
"""The value of ``rope_parameters.rope_type``."""


def entropy_scale(positions: Tensor, original_length: int) -> Tensor:
    r"""Return the factor of the attention logits of each query.

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


def scaled_attention(attention: Callable[..., Any], module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return attention of ``[B, H, T, D]`` queries, of which those beyond the original length are scaled.

    The arguments are those of transformers, with the function that computes attention; a ``ValueError`` is raised if
    the model gives no ``position_ids``.
    """
    config: Any = module.config
    rope = config.rope_parameters
    if module.layer_idx >= rope["unscaled_layers"]:
        positions = kwargs.get("position_ids")
        if positions is None:
            raise ValueError(
                f"`{type(module).__name__}` gives attention no positions, by which EABF scales it: extend this"
                " model by another method, such as 'abf'."
            )
        scale = entropy_scale(positions, rope["original_max_position_embeddings"])[:, None, :, None]
        query = (query * scale).to(query.dtype)  # promoted to float32 and rounded once
    return attention(module, query, *args, **kwargs)
