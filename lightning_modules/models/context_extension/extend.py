"""Change a model's config to a longer context, even if it is already extended.

The config must change before the model is built: a later change would be saved, but have no effect.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lightning_modules.models.context_extension.architectures import FIXED_WINDOWS, REFUSED
from lightning_modules.models.context_extension.eabf import EABF
from lightning_modules.models.context_extension.frequencies import (
    LOCAL_LAYERS,
    Parameters,
    frequencies,
    global_parameters,
    parameter_sets,
    plain_frequencies,
)
from lightning_modules.models.context_extension.methods import (
    METHODS,
    ContextExtension,
    check_divisors,
    check_ntk_width,
    longrope_attention_factor,
)
from lightning_modules.models.context_extension.patterns.settings import PATTERN_SETTINGS
from lightning_modules.models.context_extension.rope_types import (
    ROPE_TYPES,
    check_parameters,
    own_type,
    register_rope_types,
)
from lightning_modules.models.context_extension.rotary_checks import depends_on_length

log = logging.getLogger(__name__)

PHI3_METHODS = ("abf", "ntk", "longrope")
"""Methods that the RoPE types of Phi-3 express, `default` and `longrope`."""
MULTIPLIED = ("pi", "ntk_by_parts", "yarn", "llama3")
"""Methods that can be applied twice: the result is one extension by the product of both factors."""


def extend_config(config: PreTrainedConfig, settings: Mapping[str, Any] | ContextExtension | None) -> None:
    """Extend a config if there are settings, and register its RoPE type if it is one of ours.

    Raises:
        ValueError: If the method does not support the model, or cannot follow the extension that it has.
    """
    if settings is not None:
        _extend(ContextExtension.parse(settings), config)
    text = config.get_text_config(decoder=True)
    if own_type(text) is not None:
        check_parameters(global_parameters(text))
        register_rope_types()


def _extend(extension: ContextExtension, config: PreTrainedConfig) -> None:
    """Change a config; raise a ``ValueError`` if the method does not support the model."""
    _check_fits(extension, config)
    if getattr(config, "head_dim", 0) is None:  # Mixtral: transformers' YaRN and LongRoPE would fail
        config.head_dim = config.hidden_size // config.num_attention_heads
    extended: dict[str | None, Parameters] = {}
    for kind, parameters in parameter_sets(config).items():
        extended[kind] = parameters if kind in LOCAL_LAYERS else _extend_parameters(extension, config, parameters)
    config.rope_parameters = extended.get(None, {**config.rope_parameters, **extended})
    config.max_position_embeddings = extension.target_length
    if extension.method == "dynamic_ntk":
        config.max_position_embeddings = extension.original_length  # compared with the length of a text
    if hasattr(config, "original_max_position_embeddings") and extension.method != "none":
        # Phi-3: overrides that of `rope_parameters`, which may be the length before an earlier extension.
        length = global_parameters(config).get("original_max_position_embeddings", extension.original_length)
        config.original_max_position_embeddings = length
    if extension.full_attention or extension.method.endswith("_authors"):
        # Readers of the saved config differ in which of these they look at.
        layers = ["full_attention"] * config.num_hidden_layers
        for name, value in (("sliding_window", None), ("use_sliding_window", False), ("layer_types", layers)):
            if hasattr(config, name):
                setattr(config, name, value)
    config.validate()


def _check_fits(extension: ContextExtension, config: PreTrainedConfig) -> None:
    supported = METHODS[extension.method].architectures
    if config.model_type not in supported:
        # Other architectures may use RoPE differently.
        fit = [name for name, method in METHODS.items() if config.model_type in method.architectures]
        advice = f"choose one of {', '.join(fit)}" if fit else "remove it (`--model.context_extension null`)"
        reason = REFUSED.get(config.model_type, "which was not compared with the method's formula")
        if extension.method.endswith("_authors"):
            reason = f"but {' and '.join(supported)} only"
        raise ValueError(
            f"The `context_extension` '{extension.method}' does not support '{config.model_type}', {reason}: {advice},"
            " or set `model_config.rope_parameters` yourself."
        )
    windows = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    nested = None not in parameter_sets(config)
    if extension.full_attention and (nested or config.model_type in FIXED_WINDOWS):
        raise ValueError(
            f"`context_extension.full_attention: true` would change the rotation of '{config.model_type}', whose"
            " sliding-window layers treat positions differently: remove it."
        )
    if extension.method in PATTERN_SETTINGS and not extension.full_attention and windows and not nested:
        raise ValueError(
            f"The model has sliding windows of {config.sliding_window} tokens, which the pattern '{extension.method}'"
            " must replace: set `context_extension.full_attention: true`."
        )


def _extend_parameters(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> Parameters:
    """Return the ``rope_parameters`` of layers that see the whole text, extended from their present values.

    A model with plain RoPE gets the parameters of the method. A model that is already extended

    - by the same method gets a larger factor;
    - by any method gets a higher base from ``abf``, and from ``eabf`` if it has EABF (its scale keeps its length);
    - by a method of other frequencies rotates by the new method's formula on these frequencies, written as LongRoPE
      with equal divisors for short and long texts, which transformers loads;
    - keeps its frequencies as the ``inner`` ones of EABF or of an attention pattern.
    """
    name = extension.method
    present = _complete(config, present)
    kind = present["rope_type"]
    if name == "none":
        return present
    if kind != "default":
        _check_again(extension, config, present)
    if name == "abf" or (name == EABF and kind == EABF):
        return _raise_base(extension, config, present)
    if name in ROPE_TYPES:
        return _extend_by_own_type(extension, config, present)
    if name in MULTIPLIED and name == _present_method(present):
        return _multiply_factor(present, extension.factor, extension.chosen_options())
    if kind != "default":
        return _rotate_further(extension, config, present)
    # Merged, because `rope_theta` and `partial_rotary_factor` of the model stay.
    extended = {**present, **METHODS[name].rope(extension, config, present)}
    if config.model_type == "phi3" and name not in PHI3_METHODS:
        theta, attention_factor = frequencies(config, extended)
        return _as_longrope(extension, config, present, theta.double(), attention_factor)
    return extended


def _complete(config: PreTrainedConfig, present: Parameters) -> Parameters:
    """Add the values that transformers would compute from the model's maximum length, which the extension changes."""
    kind = present["rope_type"]
    completed = dict(present)
    if kind in ("yarn", "longrope") and present.get("factor") is None:
        completed["factor"] = config.max_position_embeddings / present["original_max_position_embeddings"]
    if kind == "longrope" and present.get("attention_factor") is None:
        completed["attention_factor"] = frequencies(config, present)[1]
    return completed


def _raise_base(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> Parameters:
    higher = {**present, **METHODS["abf"].rope(extension, config, present)}
    if higher["rope_theta"] == present["rope_theta"]:
        message = f"`context_extension.base` = {present['rope_theta']:g} is already the model's RoPE base"
        if present["rope_type"] != "default":
            raise ValueError(f"{message}: set a higher one.")
        # Training on longer texts at the same base is possible.
        log.warning("%s, so only its number of positions changes. Set a higher one to extend its frequencies.", message)
    if "inner" in present:
        higher["inner"] = {**present["inner"], "rope_theta": higher["rope_theta"]}
    return higher


def _extend_by_own_type(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> Parameters:
    own = {**_rotated_part(present), **METHODS[extension.method].rope(extension, config, present)}
    if present["rope_type"] != "default":
        own["inner"] = {**present, "rope_theta": own["rope_theta"]}
    return own


def _check_again(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> None:
    """Raise a ``ValueError`` for an extension that cannot be applied after the model's present one."""
    name = extension.method
    kind = present["rope_type"]
    advice = "remove `context_extension`, or extend the model that this one was made from"
    if depends_on_length(present):
        raise ValueError(f"The model's RoPE type '{kind}' depends on the length of the text: {advice}.")
    follows_own = name == "abf" or (name == EABF and kind == EABF)
    if name == "dynamic_ntk" or name.endswith("_authors") or (kind in ROPE_TYPES and not follows_own):
        raise ValueError(
            f"The model is already extended (RoPE type '{kind}'), and '{name}' cannot extend it further: {advice}."
        )
    if name in ("alibi", "xpos"):
        raise ValueError(f"'{name}' is defined for plain RoPE, and the model's type is '{kind}': {advice}.")
    if "mscale_all_dim" in present and name not in ("yarn", "abf"):
        raise ValueError(
            f"The attention of '{config.model_type}' also scales its logits by the factor of YaRN, so only 'yarn'"
            f" and 'abf' can extend it further, not '{name}'."
        )
    before = present.get("original_max_position_embeddings")
    if kind == "linear":
        before = config.max_position_embeddings / present["factor"]
    if before is not None and kind not in ROPE_TYPES and extension.original_length <= before:
        raise ValueError(
            f"The model is already extended from {before:g} tokens (RoPE type '{kind}'): set"
            f" `context_extension.original_length` = {extension.original_length} to its current length."
        )


def _present_method(parameters: Parameters) -> str:
    """Return the method that ``rope_parameters`` of transformers' types express."""
    kind = parameters["rope_type"]
    if kind == "yarn" and parameters.get("attention_factor") == 1.0:
        return "ntk_by_parts"
    return "pi" if kind == "linear" else kind


def _rotated_part(parameters: Parameters) -> Parameters:
    """Return the base and the rotated part of each head, which every RoPE type keeps."""
    return {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}


def _multiply_factor(present: Parameters, factor: float, options: dict[str, float]) -> Parameters:
    """Return the parameters of the same method with a further factor."""
    before = present["factor"]
    further = {**present, "factor": before * factor, **options}
    attention_factor = present.get("attention_factor")
    if _present_method(present) == "yarn" and attention_factor is not None and "attention_factor" not in options:
        if not math.isclose(attention_factor, 0.1 * math.log(before) + 1, rel_tol=1e-6):
            raise ValueError(
                f"The model's YaRN has a custom `attention_factor`, {attention_factor:g}: set"
                " `context_extension.attention_factor` for the new length."
            )
        del further["attention_factor"]  # transformers computes it from the new factor
    return further


def _rotate_further(extension: ContextExtension, config: PreTrainedConfig, present: Parameters) -> Parameters:
    """Return the parameters of a method's formula on the present frequencies."""
    theta, attention_factor = frequencies(config, present)
    further, own_factor = _scale_frequencies(extension, config, present, theta.double())
    return _as_longrope(extension, config, present, further, attention_factor * own_factor)


def _as_longrope(
    extension: ContextExtension, config: PreTrainedConfig, present: Parameters, theta: Tensor, attention_factor: float
) -> Parameters:
    """Return LongRoPE parameters, with equal divisors for all lengths, of ``[R / 2]`` float64 frequencies."""
    divisors = (plain_frequencies(config, present).double() / theta).tolist()
    return {
        **_rotated_part(present),
        "rope_type": "longrope",
        "factor": extension.factor,
        "original_max_position_embeddings": extension.original_length,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": attention_factor,
    }


def _scale_frequencies(
    extension: ContextExtension, config: PreTrainedConfig, present: Parameters, theta: Tensor
) -> tuple[Tensor, float]:
    """Return ``[R / 2]`` float64 frequencies and the factor of cos and sin, from the present frequencies."""
    method = extension.method
    factor = extension.factor
    if method == "pi":
        return theta / factor, 1.0
    if method == "ntk":
        check_ntk_width(extension, config, present)
        # Component j of d / 2 is divided by s^(2 j / (d - 2)): the first is kept, and the last is interpolated.
        exponents = torch.arange(len(theta), dtype=torch.float64) / (len(theta) - 1)
        return theta * factor**-exponents, 1.0
    if method == "longrope":
        divisors = torch.tensor(check_divisors(extension.long_factor, config, present), dtype=torch.float64)
        return theta / divisors, extension.attention_factor or longrope_attention_factor(extension)
    turns = extension.original_length * theta / (2 * math.pi)  # of a component in the original length
    if method == "llama3":
        low, high = extension.options("low_freq_factor", "high_freq_factor").values()
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return theta * (kept + (1 - kept) / factor), 1.0
    # YaRN's ramp is linear in the index, which is the logarithm of the turns of plain RoPE.
    fast, slow = extension.options("beta_fast", "beta_slow").values()
    kept = ((turns / slow).log() / math.log(fast / slow)).clamp(0, 1)
    own_factor = 1.0
    if method == "yarn":
        own_factor = extension.attention_factor or 0.1 * math.log(factor) + 1
    return theta * (kept + (1 - kept) / factor), own_factor
