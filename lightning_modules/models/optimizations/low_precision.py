"""A short pass in fewer bits than training: its log-likelihoods only weigh tokens, they are not differentiated."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import ScalingType

ShortDType = Literal["bfloat16", "float8"]
"""``bfloat16`` is autocast; ``float8`` multiplies in e4m3 in the decoder's linear layers, and in bfloat16 elsewhere."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def check_short_dtype(dtype: ShortDType | None, device: torch.device) -> None:
    """Raise a ``ValueError`` for a GPU that cannot multiply in the type."""
    if dtype == "float8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"`short_dtype: float8` needs a GPU of compute capability 8.9 or more (Ada, Hopper), and"
            f" {torch.cuda.get_device_name(device)} has"
            f" {'.'.join(map(str, torch.cuda.get_device_capability(device)))}: use `bfloat16`."
        )


@contextlib.contextmanager
def short_precision(decoder: nn.Module, device: torch.device, dtype: ShortDType | None) -> Iterator[None]:
    """Within, the model computes in ``dtype``; its weights stay what they are.

    Args:
        decoder: The part whose linear layers may use 8 bits; the head never does.
        device: Where it runs.
        dtype: None changes nothing.
    """
    if dtype is None:
        yield
        return
    linears = [module for module in decoder.modules() if dtype == "float8" and _fits_float8(module)]
    for linear in linears:
        linear.forward = partial(_float8_linear, linear)
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    finally:
        for linear in linears:
            del linear.forward


def _fits_float8(module: nn.Module) -> bool:
    """Plain linear layers whose sides the GPU's 8-bit units divide; adapters inside a layer keep their own type."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def _float8_linear(linear: Any, inputs: Tensor) -> Tensor:
    """``[.., out]`` in bfloat16; each token and each output feature has a scale of its own."""
    rows, row_scale = _quantise(inputs.flatten(0, -2))
    weight, weight_scale = _quantise(linear.weight)
    output = F.scaled_mm(
        rows,
        weight.T,
        row_scale,
        ScalingType.RowWise,
        weight_scale.T,
        ScalingType.RowWise,
        output_dtype=torch.bfloat16,
    )
    output = output if linear.bias is None else output + linear.bias.to(output.dtype)
    return output.unflatten(0, inputs.shape[:-1])


def _quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, D]`` in e4m3 and the ``[N, 1]`` float32 scale that it has to be multiplied by."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    return (rows / scale).to(torch.float8_e4m3fn), scale
