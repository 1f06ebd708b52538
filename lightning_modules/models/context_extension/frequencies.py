"""Rotary frequencies of a model's config: its sets of ``rope_parameters``, and the frequencies of each set."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Parameters = dict[str, Any]
"""A set of ``rope_parameters``: ``rope_type``, ``rope_theta`` and the parameters of the type."""

LOCAL_LAYERS = ("sliding_attention", "chunked_attention", "linear_attention")
"""Kinds of layers that attend within a window only, and do not need an extension."""


def parameter_sets(config: PreTrainedConfig) -> dict[str | None, Parameters]:
    """Return the ``rope_parameters`` of each kind of layer, or of None if all layers share them.

    Gemma 3, for example, has one set for ``full_attention`` and another for ``sliding_attention``.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or ()
    # A kind of layer without positions has None.
    nested = {kind: value for kind, value in parameters.items() if kind in kinds and value is not None}
    return nested or {None: parameters}


def layer_parameters(config: PreTrainedConfig, layer: Any) -> Parameters:
    """Return the ``rope_parameters`` of a layer; empty for a kind of layer without positions."""
    sets = parameter_sets(config)
    if None in sets:
        return sets[None]
    kinds: Any = config.layer_types
    return sets.get(kinds[layer], {})


def global_parameters(config: PreTrainedConfig) -> Parameters:
    """Return the ``rope_parameters`` of the layers that see the whole text."""
    sets = parameter_sets(config)
    for kind, parameters in sets.items():
        if kind not in LOCAL_LAYERS:
            return parameters
    return {}


def rotary_width(config: PreTrainedConfig, parameters: Parameters) -> int:
    """Return the number of rotated components of each attention head."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width * parameters.get("partial_rotary_factor", 1.0))


def plain_frequencies(config: PreTrainedConfig, parameters: Parameters) -> Tensor:
    """Return ``[R / 2]`` float32 inverse frequencies of plain RoPE with the base of these parameters."""
    width = rotary_width(config, parameters)
    # In the order and the dtypes of transformers, so that equal bases give equal bits.
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / (parameters["rope_theta"] ** exponents)


def inner_parameters(parameters: Parameters) -> Parameters:
    """Return the parameters of the frequencies of one of our types: its ``inner`` set, or plain RoPE."""
    return parameters.get("inner") or {**parameters, "rope_type": "default"}


def frequencies(config: PreTrainedConfig, parameters: Parameters) -> tuple[Tensor, float]:
    """Return ``[R / 2]`` float32 inverse frequencies on the CPU, and the factor of cos and sin.

    The parameters are of a type of transformers, whose frequencies do not depend on the length of the text.
    """
    if parameters["rope_type"] == "default":
        return plain_frequencies(config, parameters), 1.0
    # Flat, because transformers' YaRN does not read all of a nested set.
    flat: Any = copy.copy(config)
    flat.layer_types = None
    flat.rope_parameters = dict(parameters)
    if None not in parameter_sets(config):
        flat.rope_parameters.pop("truncate", None)  # which transformers reads from flat sets only
    length = parameters.get("original_max_position_embeddings")
    if length is not None and hasattr(flat, "original_max_position_embeddings"):  # Phi-3: overrides the parameters
        flat.original_max_position_embeddings = length
    if getattr(flat, "head_dim", 0) is None:
        flat.head_dim = flat.hidden_size // flat.num_attention_heads
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](flat, torch.device("cpu"))
