"""Format a plan as text for a terminal."""

import textwrap
from collections.abc import Iterator
from typing import Any

from lightning_modules.commands.plan.hardware import Range
from lightning_modules.commands.plan.memory import CONTEXT_GIB, FRAGMENTATION
from lightning_modules.commands.plan.transfers import BANDWIDTH
from lightning_modules.visualization.report import Table, as_text_table


def report(plan: dict[str, Any]) -> str:
    """Format a plan section by section, with units."""
    sections = (_format_header, _format_training, _format_memory, _format_scoring, _format_basis)
    return "\n\n".join("\n".join(_wrap_line(line) for line in section(plan)) for section in sections)


def _format_header(plan: dict[str, Any]) -> Iterator[str]:
    model, gpu, run = plan["model"], plan["gpu"], plan["run"]
    yield f"PLAN for {model['name']} ({model['model_type']})"
    trained = model["trained_parameters"]
    frozen = "" if trained == model["parameters"] else f", {_format_size(trained)} trained"
    yield f"  model  {_format_size(model['parameters'])}{frozen}, {model['layers']} layers"
    steps = "" if run["max_steps"] is None else f", {run['max_steps']:,} steps"
    yield (
        f"  run    {run['objective']} (K={run['context_length']}, d={run['stride']}), sequences of {run['tokens']:,}"
        f" tokens, {run['rows_per_step']} per step{steps}"
    )
    sharding = "weights, gradients and optimizer sharded (FSDP2)" if run["sharded"] else "everything on each GPU"
    yield (
        f"         {run['precision']}, {str(run['dtype']).removeprefix('torch.')} weights, gradient checkpointing"
        f" {run['checkpointing']}, {run['optimizer']}, {sharding}"
    )
    yield f"  GPU    {gpu['count']} x {gpu['name']}: {gpu['tflops']:g} TFLOP/s at peak, {gpu['memory']:g} GiB"
    yield from (f"  note: {note}" for note in plan["notes"])


def _format_training(plan: dict[str, Any]) -> Iterator[str]:
    yield "TRAINING: TFLOP per sequence, overhead of LongCE over cross entropy, time (* as configured)"
    head = ["K / d", "TFLOP", "overhead", "paper", "per step", "tokens/s", "hours", "GPU-hours", "price"]
    rows = [_format_run(row) for row in plan["training"]]
    kept = [number for number in range(len(head)) if any(row[number] for row in rows)]
    yield _format_table(*([cells[number] for number in kept] for cells in (head, *rows)))
    for row in plan["training"]:
        if row["configured"] and row["transfer_seconds"]:
            listed = ", ".join(f"{name} {format_number(value)} s" for name, value in row["transfer_seconds"].items())
            yield f"  of which transfers in a step: {listed}"


def _format_run(row: dict[str, Any]) -> list[str]:
    name = "cross entropy"
    if row["context_length"] is not None:
        name = f"{row['context_length']} / {row['stride'] or 'sliding'}"
    overheads = [row["overhead"], row["paper_overhead"]]
    numbers = [row["tokens_per_second"], row["hours"], row["gpu_hours"], row["price"]]
    return [
        f"{name} *" if row["configured"] else name,
        format_number(row["tflop"]),
        *("" if each is None else f"{each:+.0%}" for each in overheads),
        format_duration(row["step_seconds"]),
        *(format_number(each) if each else "" for each in numbers),
    ]


def _format_memory(plan: dict[str, Any]) -> Iterator[str]:
    memory = plan["memory"]
    phase = memory["largest_phase"]
    yield f"MEMORY OF TRAINING on each GPU: {_format_fit(memory)}"
    for name, size in {**memory["lasting"], **memory["phases"][phase]}.items():
        yield f"  {size:8.2f} GiB  {name}"
    yield f"  {memory['peak']:8.2f} GiB  at the peak, in phase '{phase}'"
    if memory["main_memory"]:
        yield f"  {memory['main_memory']:8.2f} GiB  in the main memory of each node"


def _format_scoring(plan: dict[str, Any]) -> Iterator[str]:
    scoring = plan["scoring"]
    yield (
        f"SCORING a document of {scoring['document_tokens']:,} tokens on one GPU (LongPPL,"
        f" K={scoring['context_length']}, d={scoring['stride']})"
    )
    rows = [[row["pass"], format_number(row["tflop"]), format_duration(row["seconds"])] for row in scoring["passes"]]
    yield _format_table(["", "TFLOP", "time"], *rows)
    if (evaluator := scoring["evaluator"]) is not None:
        yield f"  evaluator: {evaluator['name']}, {_format_size(evaluator['parameters'])}"
    for name, memory in scoring["memory"].items():
        yield f"  memory of the {name}: {_format_fit(memory)}"


def _format_basis(plan: dict[str, Any]) -> Iterator[str]:
    rates, gpu = plan["rates"], plan["gpu"]
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
        f"  Transfers: {BANDWIDTH:.0%} of {gpu['link']:g} GB/s within a node, {gpu['network']:g} GB/s per GPU between"
        f" nodes, {gpu['host']:g} GB/s to main memory. They overlap with computation completely, or not at all."
    )
    yield "  Not included: data loading, validation, checkpoints, and the optimizer on a GPU."


def _format_table(head: list[str], *rows: list[str]) -> str:
    return textwrap.indent(as_text_table(Table(head, rows)), "  ")


def _format_fit(memory: dict[str, Any]) -> str:
    fits = "fits" if memory["fits"] else "DOES NOT FIT"
    return f"{memory['needed']:.1f} of {memory['available']:g} GiB, {fits}"


def _format_size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M parameters"


def format_duration(seconds: Range) -> str:
    """Format a time in seconds or in hours."""
    return f"{format_number(seconds.times(1 / 3600))} h" if seconds.high >= 3600 else f"{format_number(seconds)} s"


def format_cost(gpu_hours: Range, price: Range | float | None) -> str:
    """Format GPU-hours, and their price if it is known."""
    return f"{format_number(gpu_hours)} GPU-hours" + (f", price {format_number(price)}" if price else "")


def format_number(value: Range | float) -> str:
    """Format a number or a range with three digits."""
    numbers = value if isinstance(value, Range) else (value,)
    return " to ".join(f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in numbers)


def _wrap_line(text: str) -> str:
    return text if "\n" in text else textwrap.fill(text, 118, subsequent_indent="    ")
