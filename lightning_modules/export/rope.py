"""RoPE of an exported config: a guard against transformers 4, and EABF as plain ABF."""

from collections.abc import Mapping
from typing import Any

from lightning_modules.models.context_extension.eabf import EABF

OLD_DEFAULTS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3"), ("rope_theta", 10_000.0)),
    "mixtral": ("rope_theta", 1_000_000.0),
    "gpt_neox": ("rotary_emb_base", 10_000.0),
}
"""The key for the RoPE base in transformers 4, and its default value, by model type."""


def guard_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a RoPE base of null for a ``config.json`` with which transformers 4 would silently use its default.

    Version 5 ignores the key; version 4 fails because it cannot compute with null.
    """
    rope = config.get("rope_parameters") or {}
    key, default = OLD_DEFAULTS.get(config["model_type"], (None, None))
    if key is None:
        return {}
    if rope.get("rope_type") == "default" and rope.get("rope_theta") == default:
        return {}
    return {key: None}


def as_abf(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``rope_parameters`` of plain ABF with the base of a model extended by EABF."""
    if rope.get("rope_type") != EABF:
        raise ValueError(
            f"`eabf_as_abf` is for RoPE of type '{EABF}', and the model's is '{rope.get('rope_type')}': remove the"
            " option."
        )
    extra = ("original_max_position_embeddings", "unscaled_layers")
    plain = {name: value for name, value in rope.items() if name not in extra}
    return plain | {"rope_type": "default"}
