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
    """Return the ``rope_parameters`` of a model extended by EABF without the scale, and with its base."""
    sets = {kind: value for kind, value in rope.items() if isinstance(value, Mapping) and kind != "inner"}
    kinds = [value["rope_type"] for value in sets.values()] or [rope.get("rope_type")]
    if EABF not in kinds:
        raise ValueError(
            f"`eabf_as_abf` is for RoPE of type '{EABF}', and the model's is '{kinds[0]}': remove the option."
        )
    if not sets:
        return _without_scale(rope)
    return {kind: _without_scale(value) if value["rope_type"] == EABF else dict(value) for kind, value in sets.items()}


def _without_scale(parameters: Mapping[str, Any]) -> dict[str, Any]:
    extra = ("original_max_position_embeddings", "unscaled_layers")
    plain = {name: value for name, value in parameters.items() if name not in extra}
    return plain.pop("inner", None) or plain | {"rope_type": "default"}
