"""Time scoring and a LongCE step of a random 8B-shaped model on one GPU, at 32k and 128k tokens.

Prints seconds, tokens/s, peak memory beside the plan's, and the share of the card's bf16 peak (MFU) for each attention
implementation; then, at the shortest length, what a LongCE step spends its time on. No weights, data or network are
needed. `longce plan` predicts 7 minutes and 98 GiB on an H200, most of it at 128k, where only a pass and a step are
timed. A case that does not fit by plan is skipped and named.

    python benchmarks/on_gpu.py
    python benchmarks/on_gpu.py --layers 2 --vocabulary 1000 --lengths 512 --context_length 64 --stride 32 --device cpu
"""

import argparse
import gc
import importlib.util
import platform
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, batch_to
from lightning_modules.commands.plan.activations import activation_bytes
from lightning_modules.commands.plan.flops import Flops, ce_step_flops, forward_flops, scoring_flops, short_pass_flops
from lightning_modules.commands.plan.memory import GIB, Training, scoring_memory, training_memory
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.functional import long_cross_entropy
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_scoring
from lightning_modules.models.optimizations import Checkpointing, enable_checkpointing
from lightning_modules.models.short_context import long_and_short, short_log_likelihood
from lightning_modules.objectives import CrossEntropy, LongCE


class Case(NamedTuple):
    """One thing to time: what it runs, its operations, and the bytes that the plan expects."""

    name: str
    run: Callable[[], object]
    flops: Flops
    planned: float


def config_of(options: argparse.Namespace) -> transformers.PreTrainedConfig:
    """Return a config with the proportions of Llama-3.1-8B."""
    return AutoConfig.for_model(
        "llama",
        hidden_size=4096 if options.device == "cuda" else 64,
        intermediate_size=14336 if options.device == "cuda" else 128,
        num_hidden_layers=options.layers,
        num_attention_heads=32 if options.device == "cuda" else 4,
        num_key_value_heads=8 if options.device == "cuda" else 2,
        vocab_size=options.vocabulary,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def build(config: transformers.PreTrainedConfig, attention: str, device: str) -> Backbone:
    """Build a random bfloat16 model on the device."""
    with torch.device(device):
        name = register_document_attention() if attention == "sdpa" else attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.bfloat16)
    backbone = Backbone(model).to(device)
    backbone.check_rotary_dtype()
    check_scoring(backbone)
    return backbone


def make_row(length: int, vocabulary: int, device: str) -> PackedBatch:
    """Return one document of random tokens."""
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = IGNORE_INDEX
    row = PackedBatch(
        input_ids=ids, labels=labels, position_ids=torch.arange(length)[None], document_boundaries=[[0, length]]
    )
    return batch_to(row, torch.device(device))


def cases(
    backbone: Backbone, config: transformers.PreTrainedConfig, length: int, options: argparse.Namespace
) -> Iterator[Case]:
    """Yield everything that is timed at one length."""
    shape, row = ModelShape.of(config), make_row(length, options.vocabulary, options.device)
    pair = (options.context_length, options.stride)
    sizes = {"context_length": pair[0], "stride": pair[1]}
    bytes_ = activation_bytes(config, dtype=torch.bfloat16)

    def training(kind: Checkpointing, *, short_pass: bool) -> Callable[[], object]:
        def step() -> None:
            enable_checkpointing(backbone.base_model, kind)
            backbone.train()
            objective, short = CrossEntropy(), None
            if short_pass:
                objective, short = LongCE(), short_log_likelihood(backbone, row, **sizes)
            long = backbone(row)
            long_cross_entropy(long, objective(long.detach(), short, row), row["labels"]).backward()
            backbone.zero_grad()

        return step

    def scoring(function: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            backbone.eval()
            with torch.no_grad():
                function()

        return run

    memory = scoring_memory(shape, bytes_, length, torch.bfloat16, windows=pair).peak
    yield Case("perplexity: one pass", scoring(lambda: backbone(row)), forward_flops(shape, length, length - 1), memory)
    both = scoring_flops(shape, shape, length, *pair, shared_pass=True)
    yield Case("LongPPL, evaluator = model", scoring(lambda: long_and_short(backbone, row, **sizes)), both, memory)
    for kind, name in ((True, "full"), ("selective", "selective")):
        plan = Training(
            tokens=length,
            context_length=pair[0],
            stride=pair[1],
            dtype=torch.bfloat16,
            autocast=None,
            checkpointing=name,
            moments=0.0,
            step_copy=False,
        )
        planned = training_memory(shape, bytes_, plan).peak
        flops = ce_step_flops(shape, length, name)
        yield Case(f"CE step, {name}", training(kind, short_pass=False), flops, planned)
        flops += short_pass_flops(shape, length, *pair)
        yield Case(f"LongCE step, {name}", training(kind, short_pass=True), flops, planned)


def timed(run: Callable[[], object], device: str, rounds: int) -> tuple[float, float]:
    """Return the fewest seconds of some rounds, and the peak in GiB."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(rounds):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best, torch.cuda.max_memory_allocated() / GIB if device == "cuda" else float("nan")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def profiled(run: Callable[[], object], device: str) -> str:
    """Return a table of the kernels that take most of the time."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
        _wait(device)
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=12, max_name_column_width=70)


def time_attention(attention: str, options: argparse.Namespace) -> str:
    """Print the rows of one attention implementation, free its model, and return the profile of a step."""
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        print("| flash_attention_2 | | not installed | | | | | |")
        return ""
    gc.collect()
    free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else float("inf")
    config = config_of(options)
    backbone = build(config, attention, options.device)
    table = ""
    for length in sorted(options.lengths):
        shortest = length == min(options.lengths)
        for case in cases(backbone, config, length, options):
            if not shortest and case.name not in ("perplexity: one pass", "LongCE step, full"):
                continue  # each takes minutes
            if case.planned > free:
                print(f"| {attention} | {length} | {case.name} | needs {case.planned / GIB:.0f} GiB | | | | |")
                continue
            seconds, peak = timed(case.run, options.device, rounds=2 if shortest else 1)
            share = case.flops.total / seconds / (options.peak_tflops * 1e12)
            print(
                f"| {attention} | {length} | {case.name} | {seconds:.2f} | {length / seconds:,.0f}"
                f" | {peak:.1f} / {case.planned / GIB:.1f} | {case.flops.total / 1e12:,.0f} | {share:.0%} |",
                flush=True,
            )
            if shortest and case.name == "LongCE step, full":
                title = f"A LongCE step with {attention} at {length} tokens:"
                table = f"{title}\n{profiled(case.run, options.device)}"
    return table


def main() -> None:
    """Print the table and the profile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--context_length", type=int, default=4096)
    parser.add_argument("--stride", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--attention", nargs="+", default=["sdpa", "flash_attention_2"])
    parser.add_argument("--peak_tflops", type=float, default=989.4, help="of the card, dense bf16: an H200's")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu makes the model tiny: a rehearsal"
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    card = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{card}, {versions}, bfloat16, {options.layers} layers\n")
    print("| attention | tokens | what | s | tokens/s | peak GiB / planned | TFLOP | MFU |")
    print("|---|---|---|---|---|---|---|---|")
    profiles = [time_attention(attention, options) for attention in options.attention]
    print("\n".join(["", *filter(None, profiles)]))


if __name__ == "__main__":
    main()
