"""Cards by name, and how long operations take on one."""

import difflib
from dataclasses import dataclass

from lightning_modules.commands.plan.flops import Flops


@dataclass(frozen=True)
class GPU:
    """A card.

    Attributes:
        name: As it is asked for.
        tflops: Peak of dense bfloat16 matrix products with float32 sums, TFLOP/s.
        memory: GiB.
    """

    name: str
    tflops: float
    memory: float


# Rates from the vendors' data sheets: dense ones (often printed as half of the sparse). Of the nominal memory what a
# program finds: error correction and the driver take their share.
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


def find_gpu(name: str | None, *, tflops: float | None = None, memory: float | None = None) -> GPU:
    """The card of that name, or one with rate and memory of the caller's own.

    Args:
        name: One of `GPUS`, in small or capital letters, with or without spaces and dashes.
        tflops: Replaces the card's peak rate, TFLOP/s.
        memory: Replaces the card's memory, GiB.

    Raises:
        ValueError: If the name is unknown and rate or memory is missing, or one of these is not above 0.
    """
    for option, value in (("gpu_tflops", tflops), ("gpu_memory", memory)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"`{option}` must be a number above 0, got {value}.")
    known = {_plain(key): gpu for key, gpu in GPUS.items()}
    gpu = known.get(_plain(name)) if name else None
    if gpu is None and (tflops is None or memory is None):
        near = difflib.get_close_matches(_plain(name or ""), known, n=1)
        hint = f" Did you mean {known[near[0]].name}?" if near else ""
        raise ValueError(
            f"`gpu` {name!r} is not among the known cards: {', '.join(GPUS)}.{hint}"
            " For another one give `gpu_tflops` (dense bfloat16 TFLOP/s) and `gpu_memory` (GiB)."
        )
    base = gpu or GPU(name or "GPU", 0.0, 0.0)
    return GPU(base.name, tflops or base.tflops, memory or base.memory)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak rate that are assumed to be reached; measure yours and replace them.

    Attributes:
        gemm: Large products with weights in bfloat16.
        attention: Flash attention 2, forward.
        attention_backward: Flash attention 2, backward.
    """

    gemm: float = 0.65
    attention: float = 0.38
    attention_backward: float = 0.30


def seconds(flops: Flops, gpu: GPU, efficiency: Efficiency = Efficiency()) -> float:
    """Time of these operations on one card; everything that is no matrix product or attention is left out."""
    work = (
        flops.gemm / efficiency.gemm
        + flops.attention / efficiency.attention
        + flops.attention_backward / efficiency.attention_backward
    )
    return work / (gpu.tflops * 1e12)
