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
        self.weight, self.scales = _round_rows(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``[.., O]`` bfloat16 outputs of ``[.., I]`` inputs."""
        tokens, scales = _round_rows(inputs.flatten(0, -2))
        factors = tokens, self.weight.t(), scales, F.ScalingType.RowWise, self.scales.t(), F.ScalingType.RowWise
        # Fast accumulation on Hopper, as in torchao
        outputs = F.scaled_mm(*factors, output_dtype=torch.bfloat16, use_fast_accum=True)
        outputs = outputs.unflatten(0, inputs.shape[:-1])
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


def _round_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[N, D]`` rows in float8, and ``[N, 1]`` float32 scales by which to multiply them."""
    largest = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    return (values / scales).to(torch.float8_e4m3fn), scales


class Float8Layers:
    """Float8 copies of a decoder's linear layers, a byte per weight."""

    def __init__(self) -> None:
        self._step, self._copies = -1, dict[str, Float8Linear]()

    @contextlib.contextmanager
    def replace(self, decoder: nn.Module, step: int) -> Iterator[None]:
        """Replace linear layers by their copies, which are renewed when ``step``, the optimizer step, changes.

        The step, because fused optimizers do not increase the version of a weight. Adapters keep their precision, and
        so do layers whose sizes are not multiples of 16, as float8 products need.
        """
        modules = [(name, module) for name, module in decoder.named_modules() if "lora_" not in name]
        linears = {name: module for name, module in modules if type(module) is nn.Linear}
        linears = {name: module for name, module in linears.items() if not any(n % 16 for n in module.weight.shape)}
        if step != self._step:
            self._copies.clear()  # before the new ones take memory
            self._step, self._copies = step, {name: Float8Linear(linear) for name, linear in linears.items()}
        try:
            for name, copy in self._copies.items():
                decoder.set_submodule(name, copy)
            yield
        finally:
            for name, linear in linears.items():
                decoder.set_submodule(name, linear)
