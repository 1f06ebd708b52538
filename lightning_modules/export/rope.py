"""RoPE keys in the exported config for versions of transformers that do not support ``rope_parameters``."""

from collections.abc import Mapping
from typing import Any

from lightning_modules.models.context_extension.eabf import EABF
from lightning_modules.models.context_extension.rope_types import ROPE_TYPES

LLAMA_TYPES = ("default", "linear", "dynamic", "llama3")
LEGACY_TYPES: dict[str, tuple[str, ...]] = {
    "llama": LLAMA_TYPES,
    "qwen2": LLAMA_TYPES,
    "mistral": ("default",),
    "mixtral": ("default",),
    "gemma": ("default",),
}
"""RoPE types that transformers 4.45 computes correctly from ``rope_theta`` and ``rope_scaling``, by model type.

Mistral, Mixtral and Gemma ignore ``rope_scaling``, and YaRN takes the target length for the original one.
"""

OLD_DEFAULTS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"), ("rope_theta", 10_000.0)),
    "mixtral": ("rope_theta", 1_000_000.0),
    "gpt_neox": ("rotary_emb_base", 10_000.0),
}
"""The key for the RoPE base in transformers 4, and its default value, by model type."""


def own_type_name(config: Mapping[str, Any]) -> str | None:
    """Return the RoPE type of a ``config.json`` if it is one of ours, and None otherwise."""
    rope_type = (config.get("rope_parameters") or {}).get("rope_type")
    return rope_type if rope_type in ROPE_TYPES else None


def legacy_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling`` for transformers 4, or raise a ``ValueError`` if it would be wrong."""
    rope = dict(config.get("rope_parameters") or {})
    model_type, rope_type = config["model_type"], rope.get("rope_type", "")
    if rope_type not in LEGACY_TYPES.get(model_type, ()):
        known = ", ".join(f"{name} ({', '.join(types)})" for name, types in LEGACY_TYPES.items())
        raise ValueError(
            f"`legacy_rope_keys`: transformers 4.45 would compute RoPE of type '{rope_type}' wrongly for models of type"
            f" '{model_type}'; it supports {known}. Leave the option out, and use transformers 5, or set `eabf_as_abf`"
            " for EABF (logits then differ beyond the original length)."
        )
    theta = rope.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope_type == "default" else {**rope, "type": rope_type}}


def guard_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a RoPE base of null for a ``config.json`` with which transformers 4 would silently use its default.

    Version 5 ignores the key; version 4 fails because it cannot compute with null.
    """
    rope = config.get("rope_parameters") or {}
    key, default = OLD_DEFAULTS.get(config["model_type"], (None, None))
    plain = rope.get("rope_type") == "default" and rope.get("rope_theta") == default
    return {} if key is None or plain else {key: None}


def as_abf(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``rope_parameters`` of plain ABF with the base of a model extended by EABF."""
    if rope.get("rope_type") != EABF:
        raise ValueError(
            f"`eabf_as_abf` is for RoPE of type '{EABF}', and the model's is '{rope.get('rope_type')}': remove the"
            " option."
        )
    ours = ("original_max_position_embeddings", "unscaled_layers")
    return {**{name: value for name, value in rope.items() if name not in ours}, "rope_type": "default"}
