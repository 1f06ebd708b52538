"""RoPE types beyond those of transformers.

EABF and the attention patterns depend on layer and position, so that neither cos and sin (one pair for all layers, for
queries and keys) nor a hook on a projection (fused, normalized or adapted in some models) can express them. Each is a
value of ``rope_parameters.rope_type``, which a saved config carries, and a wrapper around the attention functions of
transformers, which does nothing for models of other RoPE types. Without `register_rope_types`, such a model does not
load: ``KeyError: 'eabf'``.
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

from lightning_modules.models.attention import DOCUMENT_SDPA, register_document_attention
from lightning_modules.models.context_extension.eabf import EABF, scaled_attention
from lightning_modules.models.context_extension.patterns import PATTERNS, Pattern, Rotary
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS
from lightning_modules.models.context_extension.patterns.trained import check_dilation

TYPE_ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gpt_neox")
"""Model types whose attention passes positions on and rotates the usual halves, as tests verify."""

BACKENDS = ("sdpa", DOCUMENT_SDPA, "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations that are wrapped."""

PATTERN_BACKENDS = ("sdpa", DOCUMENT_SDPA)
"""Those that a pattern can replace: their masks mark padding."""


class RopeType(NamedTuple):
    """Attention (given the wrapped function and its arguments), inverse frequencies, backends and parameters."""

    attend: Callable[..., Any]
    frequencies: Callable[[PreTrainedConfig], Tensor]
    backends: tuple[str, ...]
    parameters: tuple[str, ...]


def rotary_width(config: PreTrainedConfig) -> int:
    """Return how many components of each attention head are rotated."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))


def plain_frequencies(config: PreTrainedConfig) -> Tensor:
    """Return ``[R / 2]`` float32 inverse frequencies of plain RoPE at the base in the config."""
    width = rotary_width(config)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents)


def no_frequencies(config: PreTrainedConfig) -> Tensor:
    """Return zeros: cos is 1 and sin 0, so that a pattern gets, and a cache keeps, states that are not rotated."""
    return torch.zeros_like(plain_frequencies(config))


def _patterned_attention(
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
    if config._attn_implementation in BACKENDS:  # it may have been changed since the model was built
        _check_backend(config, PATTERN_BACKENDS)
    frequencies = plain_frequencies(config).to(query.device)
    rotary = Rotary(config.rope_parameters, frequencies, kwargs["scaling"], kwargs.get("dropout", 0.0))
    boundaries = kwargs.get("document_boundaries")
    output = by_document(lambda q, k, v: pattern(q, k, v, rotary), query, key, value, attention_mask, boundaries)
    return output.transpose(1, 2).contiguous(), None


ROPE_TYPES: dict[str, RopeType] = {
    EABF: RopeType(
        scaled_attention, plain_frequencies, BACKENDS, ("original_max_position_embeddings", "unscaled_layers")
    ),
    **{
        name: RopeType(
            partial(_patterned_attention, pattern), no_frequencies, PATTERN_BACKENDS, PATTERN_SETTINGS[name].written
        )
        for name, pattern in PATTERNS.items()
    },
}
"""By their name in ``rope_parameters.rope_type``."""


class RopeTypeAttention:
    """Wraps an attention function of transformers for models of our RoPE types."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return attention of ``[B, H, T, D]`` queries, as transformers calls it."""
        own = own_type(getattr(module, "config", None))
        if own is None:
            return self.attention(module, query, *args, **kwargs)
        return own.attend(self.attention, module, query, *args, **kwargs)


def own_type(config: PreTrainedConfig | None) -> RopeType | None:
    """Return the RoPE type of a config, if it is one of ours."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return ROPE_TYPES.get(parameters.get("rope_type", ""))


def register_rope_types() -> None:
    """Make models of our RoPE types load and compute, leaving others alone. Repeated calls do nothing."""
    ROPE_INIT_FUNCTIONS.update({name: partial(_initial, name) for name in ROPE_TYPES})
    register_document_attention()
    attention_functions = AttentionInterface()
    for name in BACKENDS:
        attention = attention_functions.get(name)
        if attention is not None and not isinstance(attention, RopeTypeAttention):
            AttentionInterface.register(name, RopeTypeAttention(attention))


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless ``rope_parameters`` of one of our types hold the counts that the type needs."""
    name = parameters["rope_type"]
    for key in ROPE_TYPES[name].parameters:
        value, minimum = parameters.get(key), 0 if key == "unscaled_layers" else 1
        numbers = value if isinstance(value, list) and value else [value]
        if not all(isinstance(number, int) and number >= minimum for number in numbers):
            raise ValueError(
                f"The RoPE type '{name}' needs `rope_parameters.{key}`, {minimum} or more, and the model's config has"
                f" {value!r}: extend the model by `context_extension`, which sets it."
            )
    if name == "longnet":
        check_dilation(parameters["segment_lengths"], parameters["dilation_rates"])


def _check_backend(config: Any, backends: tuple[str, ...]) -> None:
    if config._attn_implementation not in backends:
        raise ValueError(
            f"The RoPE type '{config.rope_parameters['rope_type']}' cannot be reached from transformers'"
            f" '{config._attn_implementation}' attention: set `attn_implementation` to one of {', '.join(backends)}."
        )


def check_attention(model: PreTrainedModel) -> None:
    """Raise a ``RuntimeError`` if a model of one of our RoPE types would compute attention as if it were none."""
    own = own_type(model.config)
    name = model.config._attn_implementation
    if own is None or (name in own.backends and isinstance(AttentionInterface().get(name), RopeTypeAttention)):
        return
    raise RuntimeError(
        f"The attention implementation '{name}' knows nothing of what the model's RoPE type"
        f" '{model.config.rope_parameters['rope_type']}' asks for: use one of {', '.join(own.backends)}."
    )


def _initial(
    name: str, config: PreTrainedConfig, device: torch.device | None = None, seq_len: int | None = None, **_: Any
) -> tuple[Tensor, float]:
    """Return inverse frequencies and attention factor, as transformers requests them when it builds a model."""
    own = ROPE_TYPES[name]
    check_parameters(config.rope_parameters)
    _check_backend(config, own.backends)
    if config.model_type not in TYPE_ARCHITECTURES:
        raise ValueError(
            f"The RoPE type '{name}' is not known to work for models of type '{config.model_type}', only for"
            f" {', '.join(TYPE_ARCHITECTURES)}: others may hand no positions to attention or never call it."
        )
    return own.frequencies(config).to(device), 1.0


def by_document(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    boundaries: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Return ``[B, H, T, D]`` attention of the last T of S tokens within each document of each row.

    Keys and values are ``[B, H_kv, S, D]``; S is above T if a cache holds the preceding tokens. ``attention`` is that
    of one document. The mask is ``[B, 1, T, S]``, made by transformers of padding, where the output is 0. Boundaries
    are ascending indices ``[0, .., T]`` of each row; None is one document per row.

    Raises:
        ValueError: If a mask holds more than causal attention and padding: a sliding window, or packed documents.
    """
    if mask is None and boundaries is None:
        if 1 < query.shape[2] < key.shape[2]:  # an empty static cache: the rest of it is not filled yet
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        return attention(query, key, value)
    rows = []
    for row in range(len(query)):
        q, k, v = (part[row : row + 1] for part in (query, key, value))
        if mask is not None:
            rows.append(_padded(attention, q, k, v, mask[row % len(mask), 0]))
        elif boundaries is not None:
            parts = [attention(*(x[:, :, start:stop] for x in (q, k, v))) for start, stop in pairwise(boundaries[row])]
            rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def _padded(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> Tensor:
    """Return attention of one row that is padded as in its ``[T, S]`` mask."""
    (tokens, keys), device = mask.shape, mask.device
    seen = mask[-1].nonzero() if mask.dtype == torch.bool else mask.new_empty(0)
    first, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
    # With a cache the last query is the last token; without one it may be padding after it.
    shift = 0 if tokens == keys else end - tokens
    own = torch.arange(keys, device=device)
    low, high = max(first - shift, 0), end - shift  # queries that are tokens
    causal = (own >= first) & (own < end) & (own <= own[:tokens, None] + shift)
    if first == end or shift < 0 or not torch.equal(mask, causal):
        raise ValueError(
            "The attention pattern of this model follows no mask but that of padding, and was given another one. If"
            " the model has sliding windows, set `context_extension.full_attention: true`; if its rows hold several"
            " documents, set `document_boundaries` and the attention 'document_sdpa'."
        )
    output = attention(query[:, :, low:high], key[:, :, first:end], value[:, :, first:end])
    return F.pad(output, (0, 0, low, tokens - high))
