"""Checks that a model's RoPE depends on positions only, and matches its config."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_modules.models.context_extension.architectures import ARCHITECTURES
from lightning_modules.models.context_extension.rope_types import check_attention


def check_static(config: PreTrainedConfig, *, compares: bool) -> None:
    """Raise a ``ValueError`` for RoPE that depends on the length of the text.

    Without ``compares``, for a run that does not compare long and short contexts, LongRoPE is allowed.
    """
    for parameters in rope_parameter_sets(config):
        if depends_on_length(parameters) and (compares or parameters["rope_type"] == "dynamic"):
            raise ValueError(
                f"RoPE of type '{parameters['rope_type']}' depends on the length of the text, so that"
                f" {'a long and a short context cannot be compared' if compares else 'training has no fixed rotation'}."
                " Set `rope_parameters.rope_type` (with its parameters) to a type that does not, such as 'yarn',"
                " 'linear' or 'default'."
            )


def check_rotary(model: PreTrainedModel) -> None:
    """Compare a model's rotary frequencies with its config, which is saved with the model.

    Raises:
        RuntimeError: If frequencies were cast to fewer than 32 bits, frequencies or attention factor differ from the
            config, or the attention implementation does not support the RoPE type.
    """
    check_attention(model)
    # 1. Frequencies that were cast are wrong by whole turns at long positions.
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and torch.finfo(buffer.dtype).bits < 32:
            raise RuntimeError(
                f"The rotary frequencies `{name}` were cast to {buffer.dtype}, which makes long positions wrong."
                " Use a mixed precision (`bf16-mixed`) or a strategy that leaves buffers in float32."
            )
    # 2. Other architectures may compute them differently, so only verified ones are compared.
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        rotates = any(buffer.endswith("inv_freq") for buffer in module._buffers)
        if getattr(config, "model_type", None) not in ARCHITECTURES or not rotates:
            continue
        # Dynamic NTK and LongRoPE replace them in a forward pass.
        if not any(map(depends_on_length, rope_parameter_sets(config))):
            _check_frequencies(name, module)


def depends_on_length(parameters: dict[str, Any]) -> bool:
    """Return whether RoPE with these parameters has other frequencies for longer texts."""
    kind = parameters.get("rope_type")
    return kind == "dynamic" or (kind == "longrope" and parameters.get("short_factor") != parameters.get("long_factor"))


def _check_frequencies(name: str, module: Any) -> None:
    # The module itself knows how it computes frequencies from its config, of some models for each kind of layer.
    expected = type(module)(module.config)
    wrong = False
    for buffer, frequencies in module._buffers.items():
        if buffer.endswith("inv_freq"):
            actual = frequencies.detach().cpu().double()
            wanted = expected._buffers[buffer].cpu().double()
            # A cast to bfloat16 and back changes frequencies by up to 4e-3 of their value.
            wrong |= not torch.allclose(actual, wanted, rtol=1e-6, atol=0)
    for attribute, factor in vars(expected).items():
        if attribute.endswith("attention_scaling"):
            wrong |= getattr(module, attribute) != factor
    if wrong:
        raise RuntimeError(
            f"The rotary frequencies of `{name}` do not match the model's config: they were rounded, or the config was"
            " changed after the model was built. Change it before, with `context_extension` or `model_config`."
        )


def rope_parameter_sets(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE parameters, including the nested ones that some models have for each kind of layer."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def index_free_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence in which attention does not depend on token indices, or None without a limit.

    Llama 4 has layers with chunked attention, and others that scale queries in steps of ``floor_scale`` tokens. Both
    count from the start of the sequence, not by positions: in a longer sequence a second document would be scored as
    if it continued the first.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type != "llama4_text":
        return None
    # Below `floor_scale` tokens, the scale of queries is 1.
    limits = (config.attention_chunk_size, config.floor_scale - 1 if config.attn_temperature_tuning else None)
    return min((limit for limit in limits if limit is not None), default=None)
