"""Checks that a model rotates by positions only, as its config specifies."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_modules.models.context_extension.rope_types import check_attention

ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gemma", "gpt_neox")
"""Model types with one set of RoPE parameters for all layers, whose frequencies tests compare with the formulas."""


def check_static(config: PreTrainedConfig, *, compares: bool) -> None:
    """Raise a ``ValueError`` for RoPE that rotates the same tokens differently alone and in a longer text.

    Unless the run ``compares`` long and short contexts, only types without fixed frequencies are refused.
    """
    for part in rope_parts(config):
        if _follows_length(part) and (compares or part["rope_type"] == "dynamic"):
            raise ValueError(
                f"RoPE of type '{part['rope_type']}' rotates by the length of the text, so that"
                f" {'a long and a short context cannot be compared' if compares else 'training has no fixed rotation'}."
                " Set `rope_parameters.rope_type` (with its parameters) to a type that does not, such as 'yarn',"
                " 'linear' or 'default'."
            )


def check_rotary(model: PreTrainedModel) -> None:
    """Compare a model's rotation with its config, which would be saved with it.

    Raises:
        RuntimeError: If frequencies were cast to fewer than 32 bits, frequencies or attention factor are not those of
            the config, or attention does not support its RoPE type.
    """
    check_attention(model)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and torch.finfo(buffer.dtype).bits < 32:
            raise RuntimeError(
                f"The rotary frequencies `{name}` were cast to {buffer.dtype}, which makes long positions wrong."
                " Use a mixed precision (`bf16-mixed`) or a strategy that leaves buffers in float32."
            )
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "model_type", None) not in ARCHITECTURES or "inv_freq" not in module._buffers:
            continue
        if not any(_follows_length(part) for part in rope_parts(config)):
            _check_frequencies(name, module)


def _follows_length(part: dict[str, Any]) -> bool:
    kind = part.get("rope_type")
    return kind == "dynamic" or (kind == "longrope" and part.get("short_factor") != part.get("long_factor"))


def _check_frequencies(name: str, module: Any) -> None:
    expected = type(module)(module.config)
    actual = module.inv_freq.detach().cpu().double()
    wrong = not torch.allclose(actual, expected.inv_freq.double(), rtol=1e-6, atol=0)
    if wrong or module.attention_scaling != expected.attention_scaling:
        raise RuntimeError(
            f"`{name}` does not rotate as the model's config specifies: the frequencies were rounded, or the config was"
            " changed after the model was built. Change the config first, by `context_extension` or `model_config`."
        )


def rope_parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters, and those for layers of different kinds that some models have in them."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
