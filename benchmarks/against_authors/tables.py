"""The tables: measured times, how far they are from the least possible ones, and how they grow."""

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from benchmarks.against_authors.subjects import Setting, Subject
from benchmarks.against_authors.work import Run, measure
from lightning_modules.functional import short_context_windows
from lightning_modules.functional.windows import ShortContext
from longce.plan.flops import Flops, attention_pairs, ce_step_flops, scoring_flops, short_pass_flops
from longce.plan.shapes import ModelShape

HEAD = (
    "| setting | what | s: baseline / ours | ratio | MiB above entry: baseline / ours | ratio | results |\n"
    "|---|---|---|---|---|---|---|"
)


def rows(setting: Setting, results: dict[str, dict[str, Run]]) -> list[str]:
    lines = []
    for name, sides in results.items():
        baseline = sides.get("baseline")
        for side, run in sides.items():
            if side == "baseline":
                continue
            what = name if side == "ours" else f"{name}: {side}"
            if baseline is None:
                numbers = f"- / {run.seconds:.2f} | | - / {run.memory:.0f} | | no baseline: too much memory"
            else:
                numbers = (
                    f"{baseline.seconds:.2f} / {run.seconds:.2f} | {run.seconds / baseline.seconds:.2f}"
                    f" | {baseline.memory:.0f} / {run.memory:.0f} | {run.memory / max(baseline.memory, 1):.2f}"
                    f" | {_agreement(baseline.result, run.result) if side.startswith('ours') else ''}"
                )
            lines.append(f"| {setting} | {what} | {numbers} |")
    return lines


def _agreement(theirs: object, mine: object) -> str:
    """Describe how far the two results agree."""
    if isinstance(theirs, tuple) and isinstance(mine, tuple):
        if theirs[1] == mine[1] == 0:
            return "no key tokens"
        return f"LongPPL differs by {abs(mine[0] / theirs[0] - 1):.0e}, key tokens {theirs[1]} / {mine[1]}"
    assert isinstance(theirs, float)
    assert isinstance(mine, float)
    return f"loss differs by {abs(mine / theirs - 1):.0e}"


def machine_rates(config: PreTrainedConfig, setting: Setting) -> tuple[float, float]:
    """Measure GFLOP/s of matrix products and causal attention of a model's sizes on this machine: medians of 5."""
    config, rows = config.get_text_config(decoder=True), setting.context_length + setting.stride
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    left, right = torch.randn(rows, hidden), torch.randn(hidden, inner)
    query = torch.randn(1, heads, rows, head)
    product, attention = 2.0 * rows * hidden * inner, 2.0 * heads * head * rows * rows
    work = (lambda: left @ right, lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True))
    times = [statistics.median(measure(partial(_repeat, run)).seconds / 20 for _ in range(5)) for run in work]
    return product / times[0] / 1e9, attention / times[1] / 1e9


def _repeat(function: Callable[[], object]) -> None:
    for _ in range(20):
        function()


def floor_rows(subject: Subject, setting: Setting, results: dict[str, dict[str, Run]]) -> list[str]:
    """Compare measured time with the time that the operations take at the rates of this machine."""
    config, evaluator_config = subject.reader.model.config, subject.evaluator.model.config
    gemm, attention = machine_rates(config, setting)
    shape, evaluator = ModelShape.of(config), ModelShape.of(evaluator_config)
    sizes = (setting.length, setting.short_context)
    short = short_pass_flops(shape, *sizes)
    floors: dict[tuple[str, str], Flops] = {
        ("score", "ours"): _scoring_floor(evaluator, shape, *sizes),
        ("score, evaluator = model", "ours"): _scoring_floor(shape, shape, *sizes, shared_pass=True),
        ("LongCE step", "ours"): ce_step_flops(shape, setting.length, "full") + short,
        ("LongCE step", "ours, selective checkpointing"): ce_step_flops(shape, setting.length, "selective") + short,
    }
    lines = [f"Rates here: matrix products {gemm:.0f} GFLOP/s, causal attention {attention:.0f} GFLOP/s."]
    for (name, side), flops in floors.items():
        if side in results.get(name, {}):
            seconds = flops.gemm / gemm / 1e9 + (flops.attention + flops.attention_backward) / attention / 1e9
            run = results[name][side]
            lines.append(
                f"{setting}, {name}, {side}: {flops.total / 1e9:.0f} GFLOP, floor {seconds:.2f} s, measured"
                f" {run.seconds:.2f} s, {run.seconds / seconds:.2f} x"
            )
    return lines


def _scoring_floor(
    evaluator: ModelShape,
    model: ModelShape,
    tokens: int,
    short_context: ShortContext,
    *,
    shared_pass: bool = False,
) -> Flops:
    """Count the operations that an exact LongPPL needs: no unused logits or last-layer attention of the evaluator."""
    total = scoring_flops(evaluator, model, tokens, short_context, shared_pass=shared_pass)
    if not shared_pass:
        total += Flops(-2.0 * (short_context.window_length - 1) * evaluator.head_weights)
    for start, first, _ in short_context_windows([0, tokens], short_context):
        total += Flops(attention=-evaluator.pair_flops * attention_pairs(first - start - 1, evaluator.windows[-1]))
    return total


def growth(table: dict[Setting, dict[str, dict[str, Run]]]) -> list[str]:
    """Fit exponents of time and memory in the length, from the shortest to the longest sequence of a vocabulary."""
    lines = []
    for vocabulary in sorted({setting.vocabulary for setting in table}):
        settings = sorted((s for s in table if s.vocabulary == vocabulary), key=lambda s: s.length)
        for name in table[settings[0]]:
            for side in ("baseline", "ours"):
                runs = [(s.length, table[s][name][side]) for s in settings if side in table[s][name]]
                if len(runs) > 1:
                    (n, first), (m, last) = runs[0], runs[-1]
                    time = math.log(last.seconds / first.seconds) / math.log(m / n)
                    memory = math.log(last.memory / first.memory) / math.log(m / n)
                    growing = f"time ~ n^{time:.2f}, memory ~ n^{memory:.2f}"
                    lines.append(f"V={vocabulary}, {name}, {side}, {n} to {m} tokens: {growing}")
    return lines
