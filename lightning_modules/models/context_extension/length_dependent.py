"""RoPE whose frequencies depend on the length of the text: dynamic NTK and LongRoPE.

transformers chooses the frequencies in each forward pass, by the longest row. Those of dynamic NTK also remain for
shorter texts that follow. Keys in a cache keep the frequencies with which they were computed.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from lightning_modules.models.context_extension.rotary_checks import depends_on_length, rope_parameter_sets


def rotation_key(config: PreTrainedConfig, length: int) -> int:
    """Return a number that is equal for lengths in tokens at which RoPE has the same frequencies.

    Rows with different numbers cannot share a forward pass, and a text whose number changes as it grows cannot be
    continued with a cache.
    """
    key = 0
    text_config = config.get_text_config(decoder=True)
    for parameters in rope_parameter_sets(config):
        if not depends_on_length(parameters):
            continue
        if parameters["rope_type"] == "dynamic":
            key += max(length - text_config.max_position_embeddings, 0)
        else:
            key += length > parameters["original_max_position_embeddings"]
    return key


def forget_earlier_lengths(model: nn.Module) -> None:
    """Let each forward pass of a model with dynamic NTK start from the original frequencies; can be repeated."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # of some models a type for each kind of layer
        values = kinds.values() if isinstance(kinds, dict) else [kinds]
        if "dynamic" in values and _reset_frequencies not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_reset_frequencies)


def _reset_frequencies(module: Any, _: Any) -> None:
    names = [name for name in module._buffers if name.endswith("original_inv_freq")]
    for name in names:
        own = name.replace("original_inv_freq", "inv_freq")
        original = module._buffers[name].to(module._buffers[own].device)
        module.register_buffer(own, original.clone(), persistent=False)
        setattr(module, own.replace("inv_freq", "max_seq_len_cached"), module.original_max_seq_len)
