"""The dtype of a model's weights, and what ``auto`` means."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightning_modules.models.loading.config import DType, ModelConfig

log = logging.getLogger(__name__)

_FAST_ON_CPU = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Instructions (`torch.cpu.get_capabilities`), one of which makes matrix products in a type faster than in float32.

Without them, bfloat16 has 0.25 (AVX2) or 0.44 (AVX-512) of the speed of float32, and float16 0.25: measured on a CPU
with AVX512-BF16, of which oneDNN was told to use less (``ONEDNN_MAX_CPU_ISA``).
"""


SLOW_WEIGHTS_REMEDY = "the weights to float32 (`--model.dtype`, or `--evaluator_dtype` of `longce influence`)"


def stored_dtype(config: PreTrainedConfig, asked: DType = "auto") -> torch.dtype:
    """Return the dtype of a model's weights: the requested one, or for ``auto`` the stored one."""
    if asked == "auto":
        return config.dtype or torch.float32
    return getattr(torch, asked)


def scoring_config(config: ModelConfig, stored: PreTrainedConfig, device: torch.device | str) -> ModelConfig:
    """Return how a model is loaded for scoring: ``auto`` becomes float32 on a CPU that is slow in the stored type."""
    quantized = config.quantization is not None or getattr(stored, "quantization_config", None) is not None
    if config.dtype != "auto" or torch.device(device).type != "cpu" or quantized:
        return config
    if not is_slow_on_cpu(stored_dtype(stored)):
        return config
    return replace(config, dtype="float32")


@cache
def warn_of_slow_dtype(device: str, dtype: torch.dtype, remedy: str) -> None:
    """Write once to the log that a run computes in a type that this CPU is slow in."""
    if device == "cpu" and is_slow_on_cpu(dtype):
        name = str(dtype).removeprefix("torch.")
        log.warning("This CPU is slow in %s, at a quarter to half of the speed of float32: set %s.", name, remedy)


def is_slow_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether this CPU is known to lack the instructions that make a type fast."""
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions of torch lack it
    return bool(known) and dtype in _FAST_ON_CPU and not any(known.get(name) for name in _FAST_ON_CPU[dtype])


@cache
def report_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Write once to the log what ``auto`` means on this CPU, if the stored type has 16 bits."""
    name = str(stored).removeprefix("torch.")
    if stored != dtype:
        log.info(
            "This CPU is slow in %s, so `dtype: auto` computes in float32, with twice the memory of the stored weights;"
            " `--dtype %s` keeps their type.",
            name,
            name,
        )
    elif dtype in _FAST_ON_CPU:
        log.info(
            "`dtype: auto` computes in %s, the stored type: about a tenth of the key tokens may differ from those in"
            " float32, which `--dtype float32` gives.",
            name,
        )
