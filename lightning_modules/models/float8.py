"""Linear layers in float8, for passes without gradient."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Float8Linear(nn.Module):
    """A linear layer that multiplies in float8 (e4m3), with a scale for each token and each output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.scale = _round_rows(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[.., O]`` bfloat16 outputs of ``[.., I]`` inputs."""
        tokens, scales = _round_rows(inputs.flatten(0, -2))
        by_row = F.ScalingType.RowWise
        outputs = F.scaled_mm(
            tokens, self.weight.t(), scales, by_row, self.scale.t(), by_row, output_dtype=torch.bfloat16
        ).unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


def _round_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[N, D]`` rows in float8, and ``[N, 1]`` float32 scales by which to multiply them."""
    largest = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    return (values / scales).to(torch.float8_e4m3fn), scales


class Float8Layers:
    """Float8 copies of a decoder's linear layers, renewed once per optimizer step. They take a byte per weight."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._copies: dict[str, Float8Linear] = {}

    @contextlib.contextmanager
    def replace(self, decoder: nn.Module, step: int) -> Iterator[None]:
        """Replace the linear layers by their copies of optimizer step ``step``.

        Adapters keep their precision, and so do layers whose sizes are not multiples of 16, as float8 products need.
        """
        linears = {
            name: module
            for name, module in decoder.named_modules()
            if type(module) is nn.Linear and not any(size % 16 for size in module.weight.shape) and "lora_" not in name
        }
        if step != self._step:
            self._copies.clear()
            # By the step, because fused optimizers do not increase the version of a weight.
            self._step, self._copies = step, {name: Float8Linear(linear) for name, linear in linears.items()}
        try:
            for name, copy in self._copies.items():
                decoder.set_submodule(name, copy)
            yield
        finally:
            for name, linear in linears.items():
                decoder.set_submodule(name, linear)
