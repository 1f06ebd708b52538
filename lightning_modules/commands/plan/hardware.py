"""Known GPUs, and the time of operations on them."""

from typing import NamedTuple

from lightning_modules.commands.plan.flops import Flops


class GPU(NamedTuple):
    """Kind of GPU."""

    name: str  # on the command line
    tflops: float  # peak of dense bfloat16 matrix products with float32 sums, TFLOP/s
    memory: float  # GiB


# Dense rates from the vendors' data sheets (often half of the printed sparse rates), and the memory available to a
# program, which is less than the nominal memory because of error correction and the driver.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A40", 149.7, 44.4),
        GPU("A100-40", 312.0, 39.4),
        GPU("A100-80", 312.0, 79.1),
        GPU("RTX4090", 165.2, 23.5),
        GPU("RTX6000-Ada", 364.2, 47.3),
        GPU("L4", 121.0, 22.0),
        GPU("L40S", 362.0, 44.4),
        GPU("H100", 989.4, 79.1),
        GPU("H100-PCIe", 756.0, 79.1),
        GPU("H200", 989.4, 139.0),
        GPU("B200", 2250.0, 178.0),
        GPU("MI300X", 1307.4, 191.0),
    )
}

EFFICIENCY = {"gemm": 0.65, "attention": 0.38, "attention_backward": 0.30}
"""Assumed fractions of the peak rate: large bfloat16 products with weights, and flash attention 2."""


def find_gpu(name: str | None, *, tflops: float | None = None, memory: float | None = None) -> GPU:
    """Return the GPU of this name, or a GPU with the given rate (dense bfloat16 TFLOP/s) and memory (GiB)."""
    known = GPUS.get(name or "", GPU(name or "GPU", 0.0, 0.0))
    gpu = GPU(known.name, tflops or known.tflops, memory or known.memory)
    if not (gpu.tflops and gpu.memory):
        raise ValueError(
            f"`gpu` {name!r} is not among the known cards: {', '.join(GPUS)}."
            " For another one give `gpu_tflops` (dense bfloat16 TFLOP/s) and `gpu_memory` (GiB)."
        )
    return gpu


def seconds(flops: Flops, gpu: GPU) -> float:
    """Return the time of these operations on one GPU, without anything else."""
    return sum(getattr(flops, kind) / rate for kind, rate in EFFICIENCY.items()) / (gpu.tflops * 1e12)
