"""Known GPUs, and the time of operations on them: measured by `benchmarks/on_gpu.py`, or assumed."""

import difflib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from longce.plan.flops import Flops

RESULTS = Path(__file__).parent / "measured"


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


def find_gpu(name: str | None, *, tflops: float | None = None, memory: float | None = None) -> GPU:
    """Return the GPU of this name, with the given rate (dense bfloat16 TFLOP/s) and memory (GiB).

    A name in CUDA and other spellings are known as well; ``A100`` is the one with 80 GB.
    """
    known = _find_known(name or "") or GPU(name or "GPU", 0.0, 0.0)
    gpu = known._replace(tflops=tflops or known.tflops, memory=memory or known.memory)
    if not (gpu.tflops and gpu.memory):
        raise ValueError(
            f"`gpu` {name!r} is not among the known cards: {', '.join(GPUS)}.{_suggest(name or '')}"
            " For another one give `gpu_tflops` (dense bfloat16 TFLOP/s) and `gpu_memory` (GiB)."
        )
    return gpu


def _find_known(name: str) -> GPU | None:
    spelled = {re.sub(r"\W", "", known).lower(): gpu for known, gpu in GPUS.items()}
    spelled["a100"] = GPUS["A100-80"]
    return spelled.get(re.sub(r"\W|_", "", name).lower().removesuffix("gb")) or recognize_gpu(name)


def _suggest(name: str) -> str:
    spelled = {known.lower(): known for known in GPUS}
    near = difflib.get_close_matches(name.lower(), spelled, n=2, cutoff=0.5)
    if not near:
        return ""
    return f" Did you mean {' or '.join(spelled[each] for each in near)}?"


def recognize_gpu(device_name: str) -> GPU | None:
    """Return the known GPU of this name in CUDA, such as ``NVIDIA A100-SXM4-80GB``; None for another kind or a part.

    Example:
        >>> recognize_gpu("NVIDIA A100-SXM4-80GB").name
        'A100-80'
    """
    words = set(re.split(r"[\s-]+", device_name.replace("RTX ", "RTX").replace("GB", "")))
    if words & {"NVL", "MIG", "Laptop", "D"}:
        return None
    names = [name for name in GPUS if set(name.split("-")) <= words]
    if not names:
        return None
    return GPUS[max(names, key=len)]


class Range(NamedTuple):
    """Least and largest estimate."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Return both estimates times a factor."""
        return Range(self.low * factor, self.high * factor)


class Rates(NamedTuple):
    """Speed of a GPU.

    The defaults are assumed: rates of large bfloat16 products and of flash attention 2, a little below those measured
    on an H200, and the time of passes without compilation, which also wait for norms, activation functions and kernel
    launches. With them the ranges for 8 A100 with 80 GB contain all training times of the paper's Table 7.
    """

    gemm: float = 0.75  # fraction of the peak rate in products with weights
    attention: float = 0.65
    attention_backward: float = 0.55
    slowdown: Range = Range(1.0, 1.6)  # time of a whole pass or step over the time of its operations at these rates
    measured: tuple[str, ...] = ()  # names of the fields above that are measured
    source: str | None = None  # card, date and versions of the measurement

    def seconds(self, flops: Flops, gpu: GPU) -> Range:
        """Return the time of these operations on one GPU."""
        gemm = flops.gemm / self.gemm
        attention = flops.attention / self.attention
        attention_backward = flops.attention_backward / self.attention_backward
        seconds = (gemm + attention + attention_backward) / 1e12
        return self.slowdown.times(seconds / gpu.tflops)


def find_rates(gpu: GPU, path: str | None = None, *, autocast: bool) -> Rates:
    """Return the rates that `benchmarks/on_gpu.py` measured on this kind of GPU, in ``path`` or its own results.

    Whatever was not measured is assumed. ``autocast`` selects the steps in mixed precision.
    """
    if path is None:
        results = [each for each in map(_read_results, RESULTS.glob("*gpu*.json")) if each["gpu"] == gpu.name]
    else:
        results = [_read_results(Path(path))]
    if not results:
        return Rates()
    newest = max(results, key=lambda each: each["date"])
    card = GPU(newest["gpu"], newest["peak_tflops"], 0.0)
    known = {kind: tflops / card.tflops for kind, tflops in newest["rates"].items()}
    rates = Rates(**known, slowdown=Range(1.0, 1.0), measured=tuple(known), source=newest["source"])
    slowdowns = []
    for row in newest["rows"].values():
        if row.get("plain") and row["autocast"] == autocast:
            expected = rates.seconds(Flops(**row["flops"]), card)
            slowdowns.append(row["seconds"] / expected.low)
    if len(known) < 3 or not slowdowns:  # a slowdown relative to assumed rates would mean nothing
        return rates._replace(slowdown=Rates().slowdown)
    slowdown = Range(0.95 * min(slowdowns), 1.05 * max(slowdowns))
    return rates._replace(slowdown=slowdown, measured=(*known, "slowdown"))


def _read_results(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    if "rates" not in content:
        raise ValueError(f"`measured`: '{path}' must be written by `benchmarks/on_gpu.py`.")
    return content
