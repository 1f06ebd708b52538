"""Format a plan as text for a terminal."""

import textwrap
from collections.abc import Iterator
from itertools import compress
from typing import Any

from lightning_modules.visualization.report import Table, as_text_table
from longce.plan.hardware import Range
from longce.plan.memory import CONTEXT_GIB, FRAGMENTATION


def report(plan: dict[str, Any]) -> str:
    """Format a plan section by section, with units."""
    sections = []
    for format_section in (_format_header, _format_training, _format_memory, _format_basis):
        lines = map(_wrap_line, format_section(plan))
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _wrap_line(text: str) -> str:
    """Wrap a line; a text of several lines, such as a table, stays as it is."""
    if "\n" in text:
        return text
    return textwrap.fill(text, 118, subsequent_indent="    ")


def _format_header(plan: dict[str, Any]) -> Iterator[str]:
    model = plan["model"]
    gpu = plan["gpu"]
    run = plan["run"]
    yield f"PLAN for {model['name']} ({model['model_type']})"
    parameters = _format_size(model["parameters"])
    if model["trained_parameters"] != model["parameters"]:
        parameters += f", {_format_size(model['trained_parameters'])} trained"
    yield f"  model  {parameters}, {model['layers']} layers"
    steps = ""
    if run["max_steps"] is not None:
        steps = f", {run['max_steps']:,} steps"
    yield (
        f"  run    {run['objective']} (K={run['context_length']}, d={run['stride']}), sequences of {run['tokens']:,}"
        f" tokens, {run['rows_per_step']} per step{steps}"
    )
    sharding = "weights, gradients and optimizer sharded (FSDP2)" if run["sharded"] else "everything on each GPU"
    checkpointing = run["checkpointing"]
    if run["checkpointed_layers"] is not None:
        checkpointing += f" of the first {run['checkpointed_layers']} layers"
    dtype = str(run["dtype"]).removeprefix("torch.")
    yield (
        f"         {run['precision']}, {dtype} weights, gradient checkpointing {checkpointing}, {run['optimizer']},"
        f" {sharding}"
    )
    yield f"  GPU    {gpu['count']} x {gpu['name']}: {gpu['tflops']:g} TFLOP/s at peak, {gpu['memory']:g} GiB"
    for note in plan["notes"]:
        yield f"  note: {note}"


def _format_training(plan: dict[str, Any]) -> Iterator[str]:
    yield "TRAINING: TFLOP per sequence, overhead of LongCE over cross entropy, time (* as configured)"
    head = ["K / d", "TFLOP", "overhead", "per step", "before the switch", "tokens/s", "hours", "GPU-hours"]
    rows = [_format_run(row) for row in plan["training"]]
    columns = list(zip(*rows, strict=True))
    filled = list(map(any, columns))  # a column without any text is left out
    table = Table(list(compress(head, filled)), [list(compress(row, filled)) for row in rows])
    yield textwrap.indent(as_text_table(table), "  ")


def _format_run(row: dict[str, Any]) -> list[str]:
    name = "cross entropy"
    if row["context_length"] is not None:
        name = f"{row['context_length']} / {row['stride'] or 'sliding'}"
    if row["configured"]:
        name += " *"
    return [
        name,
        _format_number(row["tflop"]),
        "" if row["overhead"] is None else f"{row['overhead']:+.0%}",
        _format_duration(row["step_seconds"]),
        _format_duration(row["step_seconds_before_switch"]),
        _format_number(row["tokens_per_second"]),
        _format_number(row["hours"]),
        _format_number(row["gpu_hours"]),
    ]


def _format_memory(plan: dict[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    fitting = plan["fitting"]
    phase = memory["largest_phase"]
    available = memory["available"]
    fits = "fits" if memory["fits"] else "DOES NOT FIT"
    yield f"MEMORY OF TRAINING on each GPU: {memory['needed']:.1f} of {available:g} GiB, {fits}"
    for name, size in {**memory["lasting"], **memory["phases"][phase]}.items():
        yield f"  {size:8.2f} GiB  {name}"
    yield f"  {memory['peak']:8.2f} GiB  at the peak, in phase '{phase}'"
    if fitting is not None:
        settings = " and ".join(fitting["settings"])
        yield (
            f"  WHAT WOULD FIT: {fitting['needed']:.1f} of {available:g} GiB on each of {fitting['gpus']} GPU(s) with"
            f" {settings}"
        )
    elif not memory["fits"]:
        yield "  WHAT WOULD FIT: no combination of activation offload, FSDP2, LoRA and Ulysses on these GPUs"


def _format_basis(plan: dict[str, Any]) -> Iterator[str]:
    rates = plan["rates"]
    texts = {
        "gemm": f"{rates['gemm']:.0%} of the peak in matrix products",
        "attention": f"{rates['attention']:.0%} in attention",
        "attention_backward": f"{rates['attention_backward']:.0%} in its backward pass",
        "slowdown": f"whole steps {rates['slowdown'].low:.2f} to {rates['slowdown'].high:.2f} times slower than that",
        "context": f"{CONTEXT_GIB:g} GiB for the CUDA context",
        "fragmentation": f"{FRAGMENTATION:.0%} fragmentation, one document per sequence",
    }
    measured = ", ".join(texts.pop(name) for name in rates["measured"])
    yield "BASIS: every range goes from the fastest to the slowest of these assumptions"
    if measured:
        yield f"  Measured ({rates['source']}): {measured}."
    yield f"  Assumed, not measured on a GPU: {', '.join(texts.values())}."
    yield (
        "  Not included: transfers between GPUs and from and to main memory, data loading, validation, checkpoints, and"
        " the optimizer on a GPU."
    )


def _format_size(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f}B parameters"
    return f"{parameters / 1e6:.2f}M parameters"


def _format_duration(seconds: Range | None) -> str:
    """Format a time in seconds or in hours; empty if it is unknown."""
    if seconds is None:
        return ""
    if seconds.high >= 3600:
        return f"{_format_number(seconds.times(1 / 3600))} h"
    return f"{_format_number(seconds)} s"


def _format_number(value: Range | float | None) -> str:
    """Format a number or a range with three digits; empty if it is unknown."""
    if value is None:
        return ""
    if isinstance(value, Range):
        return f"{_format_number(value.low)} to {_format_number(value.high)}"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
