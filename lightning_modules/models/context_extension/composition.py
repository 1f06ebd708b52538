"""A further extension of a model that is already extended."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from lightning_modules.models.context_extension.frequencies import (
    Parameters,
    frequencies,
    plain_frequencies,
    rotary_width,
)

if TYPE_CHECKING:
    from lightning_modules.models.context_extension.methods import ContextExtension


def present_method(parameters: Parameters) -> str:
    """Return the method that ``rope_parameters`` of transformers' types express."""
    kind = parameters["rope_type"]
    if kind == "yarn" and parameters.get("attention_factor") == 1.0:
        return "ntk_by_parts"
    return "pi" if kind == "linear" else kind


def rotated_part(parameters: Parameters) -> Parameters:
    """Return the base and the rotated part of each head, which every RoPE type keeps."""
    return {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}


def multiply_factor(present: Parameters, factor: float, options: dict[str, float]) -> Parameters:
    """Return the parameters of the same method with a further factor."""
    before = present["factor"]
    further = {**present, "factor": before * factor, **options}
    attention_factor = present.get("attention_factor")
    if present_method(present) == "yarn" and attention_factor is not None and "attention_factor" not in options:
        if not math.isclose(attention_factor, 0.1 * math.log(before) + 1, rel_tol=1e-6):
            raise ValueError(
                f"The model's YaRN has an `attention_factor` of its own, {attention_factor:g}: set"
                " `context_extension.attention_factor` for the new length."
            )
        del further["attention_factor"]  # transformers computes it from the new factor
    return further


def rotate_further(extension: "ContextExtension", config: PreTrainedConfig, present: Parameters) -> Parameters:
    """Return the parameters of a method's formula on the present frequencies."""
    theta, attention_factor = frequencies(config, present)
    further, own_factor = _scale_frequencies(extension, config, present, theta.double())
    return as_longrope(extension, config, present, further, attention_factor * own_factor)


def as_longrope(
    extension: "ContextExtension", config: PreTrainedConfig, present: Parameters, theta: Tensor, attention_factor: float
) -> Parameters:
    """Return LongRoPE parameters, with equal divisors for all lengths, of ``[R / 2]`` float64 frequencies."""
    divisors = (plain_frequencies(config, present).double() / theta).tolist()
    return {
        **rotated_part(present),
        "rope_type": "longrope",
        "factor": extension.factor,
        "original_max_position_embeddings": extension.original_length,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": attention_factor,
    }


def _scale_frequencies(
    extension: "ContextExtension", config: PreTrainedConfig, present: Parameters, theta: Tensor
) -> tuple[Tensor, float]:
    """Return ``[R / 2]`` float64 frequencies and the factor of cos and sin, from the present frequencies."""
    method = extension.method
    factor = extension.factor
    if method == "pi":
        return theta / factor, 1.0
    if method == "ntk":
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


def longrope_attention_factor(extension: "ContextExtension") -> float:
    r"""Return LongRoPE's factor of cos and sin, :math:`\sqrt{1 + \ln s / \ln L}`."""
    return math.sqrt(1 + math.log(extension.factor) / math.log(extension.original_length))


def check_divisors(divisors: list[float] | None, config: PreTrainedConfig, present: Parameters) -> list[float]:
    """Return ``long_factor`` as floats; raise a ``ValueError`` unless it has one for each pair of components."""
    wanted = rotary_width(config, present) // 2
    found = [float(divisor) for divisor in divisors or []]
    if len(found) != wanted:
        raise ValueError(f"`context_extension.long_factor` has {len(found)} divisors; this model needs {wanted}.")
    return found
