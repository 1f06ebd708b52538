"""Times of the rows of `benchmarks/on_gpu.py`, of single operations, and of the kernels of a step."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import Case, Sizes, make_config, predict, useful_flops
from benchmarks.gpu.checks import NotAvailableError, build_module, half_precision
from lightning_modules.batch import PackedBatch, batch_to, pack_sequence
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.short_context import long_and_short
from lightning_modules.objectives import CrossEntropy, LongCE
from longce.plan.flops import ATTENTION_BACKWARD
from longce.plan.memory import GIB

REACHABLE_TFLOPS = 790.0
"""Speed of large bfloat16 matrix products on an H100 or H200."""


def time_case(case: Case, sizes: Sizes, device: str, peak_tflops: float) -> dict[str, Any]:
    """Build the model of a row, run it, and return its time, memory, and MFU without recomputation."""
    flops, planned = predict(case, sizes, device)
    if device == "cuda" and planned > torch.cuda.mem_get_info()[0]:
        raise NotAvailableError(f"needs {planned / GIB:.0f} GiB by plan")
    seconds, peak = measure(make_run(case, sizes, device), device, sizes.rounds)
    rate = useful_flops(case, sizes, device) / seconds / 1e12
    return {
        "seconds": seconds,
        "tokens_per_second": sizes.tokens / seconds,
        "peak_gib": peak / GIB,
        "planned_gib": planned / GIB,
        "mfu": rate / peak_tflops,
        "mfu_of_reachable": rate / REACHABLE_TFLOPS,
        "flops": asdict(flops),
        "autocast": case.autocast,
        "plain": case.plain,
    }


def make_run(case: Case, sizes: Sizes, device: str) -> Callable[[], None]:
    """Build a model, and return a function that runs a row once."""
    config = make_config(case.llama, case.layers, device)
    short_context = case.short_context(sizes)
    windows = {"context_length": short_context.context_length, "stride": short_context.stride}
    settings = {"gradient_checkpointing": True, "attn_implementation": "sdpa", **windows, **case.settings}
    objective, dtype = CrossEntropy() if case.kind == "CE" else LongCE(), "float32" if case.autocast else "bfloat16"
    sizes_of_model = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    settings |= {"model_config": sizes_of_model, "objective": objective, "dtype": dtype}
    module = build_module(device, autocast=case.autocast, optional=bool(case.settings), **settings)
    ids = torch.randint(config.vocab_size, (sizes.tokens,), generator=torch.Generator().manual_seed(0))
    batch = batch_to(pack_sequence(ids.split(sizes.tokens // case.documents)), torch.device(device))
    if case.kind in ("pass", "LongPPL"):
        scores = {
            "pass": partial(module.backbone, batch),
            "LongPPL": partial(long_and_short, module.backbone, batch, short_context),
        }
        return partial(_score, module.eval(), scores[case.kind], device, case.autocast)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    loss = partial(authors_loss, module, batch) if case.kind == "authors" else partial(module.training_step, batch, 0)
    return partial(_step, module, loss, optimizer, device, case.autocast)


def _score(_: LongContextLM, function: Callable[[], object], device: str, autocast: bool) -> None:
    with torch.no_grad(), half_precision(device, autocast=autocast):
        function()


def _step(
    module: LongContextLM, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: str, autocast: bool
) -> None:
    with half_precision(device, autocast=autocast):
        value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def authors_loss(module: LongContextLM, batch: PackedBatch) -> Tensor:
    """Compute LongCE as the authors' code does: full logits, one window after another."""
    model, ids, (length, stride) = (
        module.backbone.base_model,
        batch["input_ids"],
        (module.short_context.context_length, module.short_context.stride),
    )
    losses = F.cross_entropy(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:], reduction="none")
    weights = torch.ones_like(losses)
    with torch.no_grad():
        for start in range(0, ids.shape[1] - length - stride + 1, stride):
            stop = start + length + stride
            logits = model(input_ids=ids[:, start:stop], use_cache=False).logits[0, length - 1 : -1].float()
            short = F.cross_entropy(logits, ids[0, start + length : stop], reduction="none")
            long = losses[start + length - 1 : stop - 1]
            weights[start + length - 1 : stop - 1] = (short - long).exp().clamp(max=5.0)
    return (losses * weights).mean()


def measure(run: Callable[[], object], device: str, rounds: int) -> tuple[float, float]:
    """Return the fewest seconds of some rounds after one to warm up, and the peak in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for round_ in range(1 + rounds):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - started) if round_ else best
    return best, torch.cuda.max_memory_allocated() if device == "cuda" else 0.0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_rates(sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the TFLOP/s of products and of flash attention with the sizes of Llama-3.1-8B."""
    config = make_config("8B", 1, device)
    width, heads = config.hidden_size, config.num_attention_heads
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    inputs, weight = make(sizes.tokens, width), make(width, config.intermediate_size)
    shape = (1, heads, sizes.tokens, width // heads)
    query = make(*shape, requires_grad=True)
    key, value = (make(1, config.num_key_value_heads, *shape[2:], requires_grad=True) for _ in range(2))
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    with torch.no_grad():
        gemm = measure(lambda: inputs @ weight, device, 10)[0]
        forward = measure(lambda: attend(query, key, value), device, 5)[0]
    output = attend(query, key, value)
    gradient = torch.ones_like(output)
    backward = measure(lambda: output.backward(gradient, retain_graph=True), device, 5)[0]
    attention = 2.0 * sizes.tokens**2 * width
    work = {"gemm": 2.0 * inputs.numel() * weight.shape[1] / gemm}
    work |= {"attention": attention / forward, "attention_backward": ATTENTION_BACKWARD * attention / backward}
    return {"tflops": {name: rate / 1e12 for name, rate in work.items()}}


def profile_step(case: Case, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the three kernels that take most of a LongCE step, with their shares of all kernels."""
    run = make_run(case, sizes, device)
    run()
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as profiler:
        run()
        _wait(device)
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    kernels = {event.key: getattr(event, name) for event in profiler.key_averages()}
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:3]
    return {"largest": [[key[:80], spent / sum(kernels.values())] for key, spent in largest]}
