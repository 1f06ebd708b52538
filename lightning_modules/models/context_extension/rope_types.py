"""RoPE types in addition to those of transformers: EABF and attention patterns.

They depend on layer and position. Neither cos and sin (one pair for queries and keys of all layers) nor a hook on a
projection (fused, normalized or adapted in some models) can express that. Each is therefore a value of
``rope_parameters.rope_type``, which is saved with the config, and a wrapper around the attention functions of
transformers, which does nothing for other models. Without `register_rope_types`, such a model does not load:
``KeyError: 'eabf'``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_modules.models.attention import DOCUMENT_SDPA, document_attention, register_document_attention
from lightning_modules.models.context_extension.architectures import EABF_ARCHITECTURES, PATTERN_ARCHITECTURES
from lightning_modules.models.context_extension.eabf import EABF, scaled_attention
from lightning_modules.models.context_extension.frequencies import (
    frequencies,
    global_parameters,
    inner_parameters,
    layer_parameters,
    parameter_sets,
)
from lightning_modules.models.context_extension.patterns import PATTERNS, Pattern, Rotary
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS
from lightning_modules.models.context_extension.patterns.trained import check_dilation

BACKENDS = ("sdpa", DOCUMENT_SDPA, "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations that are wrapped."""

PATTERN_BACKENDS = ("sdpa", DOCUMENT_SDPA)
"""Implementations that a pattern can replace, because their masks only mark padding."""


class RopeType(NamedTuple):
    """Attention (a function of the wrapped one and its arguments), backends, parameters, and who rotates."""

    attend: Callable[..., Any]
    backends: tuple[str, ...]
    parameters: tuple[str, ...]
    rotates: bool = False  # by itself, where the model leaves queries and keys as they are


def _attend_by_pattern(
    pattern: Pattern,
    _: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    config: Any = module.config
    if config._attn_implementation in BACKENDS:  # which may have changed since the model was built
        _check_backend(config, PATTERN_BACKENDS)
    # The model's own buffer has zeros, so that the states come here without rotation.
    parameters = layer_parameters(config, module.layer_idx)
    theta, factor = frequencies(config, inner_parameters(parameters))
    if not getattr(module, "use_rope", True):  # SmolLM3: layers without positions keep all distances at 0
        theta, factor = torch.zeros_like(theta), 1.0
    dropout = kwargs.get("dropout", 0.0)
    rotary = Rotary(parameters, theta.to(query.device), kwargs["scaling"], dropout, factor)
    boundaries = kwargs.get("document_boundaries")
    output = by_document(lambda q, k, v: pattern(q, k, v, rotary), query, key, value, attention_mask, boundaries)
    return output.transpose(1, 2).contiguous(), None


ROPE_TYPES: dict[str, RopeType] = {
    EABF: RopeType(scaled_attention, BACKENDS, ("original_max_position_embeddings", "unscaled_layers")),
    **{
        name: RopeType(
            partial(_attend_by_pattern, pattern), PATTERN_BACKENDS, PATTERN_SETTINGS[name].written, rotates=True
        )
        for name, pattern in PATTERNS.items()
    },
}
"""RoPE types by their name in ``rope_parameters.rope_type``."""


class RopeTypeAttention:
    """Wraps an attention function of transformers for models of our RoPE types. It is not compiled."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.attention = attention

    @torch.compiler.disable
    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute attention with ``[B, H, T, D]`` queries and the arguments of transformers."""
        rope_type = self._type_of_layer(module)
        window = kwargs.get("attention_window")
        if window is not None and self.attention is not document_attention:  # flash attention
            # A layer's own window stays where it is narrower.
            kwargs["sliding_window"] = min(window, kwargs.get("sliding_window") or window)
        if rope_type is None:
            return self.attention(module, query, *args, **kwargs)
        return rope_type.attend(self.attention, module, query, *args, **kwargs)

    def _type_of_layer(self, module: nn.Module) -> RopeType | None:
        config: Any = getattr(module, "config", None)
        layer: Any = getattr(module, "layer_idx", None)
        if config is None or layer is None:
            return None
        return ROPE_TYPES.get(layer_parameters(config, layer).get("rope_type", ""))


def own_type(config: PreTrainedConfig) -> RopeType | None:
    """Return the RoPE type of a config if it is one of ours, and None otherwise."""
    return ROPE_TYPES.get(global_parameters(config).get("rope_type", ""))


def register_rope_types() -> None:
    """Register our RoPE types and attention wrappers with transformers; repeated calls do nothing."""
    ROPE_INIT_FUNCTIONS.update({name: partial(_init_frequencies, name) for name in ROPE_TYPES})
    register_document_attention()
    for name in BACKENDS:
        wrap_attention(name)


def wrap_attention(name: str) -> None:
    """Wrap a registered attention function of transformers, once."""
    attention = AttentionInterface().get(name)
    if attention is not None and not isinstance(attention, RopeTypeAttention):
        AttentionInterface.register(name, RopeTypeAttention(attention))


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless ``rope_parameters`` of one of our types contain valid parameters of the type."""
    name = parameters["rope_type"]
    for key in ROPE_TYPES[name].parameters:
        value = parameters.get(key)
        minimum = 0 if key == "unscaled_layers" else 1
        numbers = value if isinstance(value, list) and value else [value]
        if not all(isinstance(number, int) and number >= minimum for number in numbers):
            raise ValueError(
                f"The RoPE type '{name}' needs `rope_parameters.{key}` of {minimum} or more, but the model's config has"
                f" {value!r}: extend the model with `context_extension`, which sets it."
            )
    if name == "longnet":
        check_dilation(parameters["segment_lengths"], parameters["dilation_rates"])


def _check_backend(config: Any, backends: tuple[str, ...]) -> None:
    if config._attn_implementation not in backends:
        raise ValueError(
            f"The RoPE type '{global_parameters(config)['rope_type']}' does not support '{config._attn_implementation}'"
            f" attention: set `attn_implementation` to one of {', '.join(backends)}."
        )


def check_attention(model: PreTrainedModel) -> None:
    """Raise a ``RuntimeError`` if a model's attention would ignore its RoPE type, which is one of ours."""
    rope_type = own_type(model.config)
    name = model.config._attn_implementation
    # Both are needed: transformers may have replaced a wrapper, or the user the implementation.
    if rope_type is None or (
        name in rope_type.backends and isinstance(AttentionInterface().get(name), RopeTypeAttention)
    ):
        return
    raise RuntimeError(
        f"The attention implementation '{name}' ignores the model's RoPE type"
        f" '{global_parameters(model.config)['rope_type']}': use one of {', '.join(rope_type.backends)}."
    )


def _init_frequencies(
    name: str,
    config: PreTrainedConfig,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
    **_: Any,
) -> tuple[Tensor, float]:
    """Return inverse frequencies and attention factor, for transformers when it builds a model."""
    rope_type = ROPE_TYPES[name]
    parameters = parameter_sets(config)[layer_type]
    check_parameters(parameters)
    _check_backend(config, rope_type.backends)
    supported = PATTERN_ARCHITECTURES if rope_type.rotates else EABF_ARCHITECTURES
    if config.model_type not in supported:
        raise ValueError(
            f"The RoPE type '{name}' supports models of type {', '.join(supported)}, not '{config.model_type}', which"
            " may not pass positions to its attention, or rotates differently: use another method, such as 'abf'."
        )
    # On the CPU also where transformers builds a model without memory, whose buffers it computes again later.
    with torch.device("cpu"):
        theta, factor = frequencies(config, inner_parameters(parameters))
    if rope_type.rotates:  # cos is 1 and sin is 0: patterns and caches get states that are not rotated
        theta, factor = torch.zeros_like(theta), 1.0
    return theta.to(device or torch.get_default_device()), factor


def by_document(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Compute ``[B, H, T, D]`` attention of the last T of S tokens inside each document of each sequence.

    ``attention`` computes that of one document. Keys and values are ``[B, H_kv, S, D]``; S is above T if a cache has
    the preceding tokens. The mask is a ``[B, 1, T, S]`` padding mask of transformers; the output of padding is 0.
    Boundaries are ascending indices ``[0, .., T]`` of each sequence, or None if each is one document.
    """
    if mask is None and boundaries is None:
        if 1 < query.shape[2] < key.shape[2]:  # a static cache that is not filled yet
            key = key[:, :, : query.shape[2]]
            value = value[:, :, : query.shape[2]]
        return attention(query, key, value)
    outputs = []
    for row in range(len(query)):
        q, k, v = (states[row : row + 1] for states in (query, key, value))
        if mask is not None:
            # A mask of one row is shared by all sequences.
            outputs.append(_attend_unpadded(attention, q, k, v, mask[row % len(mask), 0]))
        elif boundaries is not None:
            spans = pairwise(boundaries[row])
            documents = [attention(*(x[:, :, start:stop] for x in (q, k, v))) for start, stop in spans]
            outputs.append(torch.cat(documents, dim=2))
    return torch.cat(outputs)


def _attend_unpadded(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Compute attention of the tokens of a sequence that its ``[T, S]`` mask does not mark as padding."""
    tokens, keys = mask.shape
    device = mask.device
    # 1. Find the first and last token in the last row of the mask.
    has_rows = tokens > 0 and mask.dtype == torch.bool  # without rows, it is a sliding window (`document_mask`)
    seen = mask[-1].nonzero() if has_rows else mask.new_empty(0)
    first, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
    # 2. Find the queries that are tokens. With a cache the last query is the last token; otherwise it may be padding.
    shift = 0 if tokens == keys else end - tokens
    low = max(first - shift, 0)
    high = end - shift
    # 3. Check that the mask has no other effect.
    index = torch.arange(keys, device=device)
    causal = (index >= first) & (index < end) & (index <= index[:tokens, None] + shift)
    if first == end or shift < 0 or not torch.equal(mask, causal):
        raise ValueError(
            "The attention pattern of this model supports padding masks only, and got another mask. For a model with"
            " sliding windows, set `context_extension.full_attention: true`; for sequences of several documents, use"
            " `document_boundaries` and the attention 'document_sdpa'."
        )
    output = attention(query[:, :, low:high], key[:, :, first:end], value[:, :, first:end])
    return F.pad(output, (0, 0, low, tokens - high))
