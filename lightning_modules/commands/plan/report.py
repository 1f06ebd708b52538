"""Format a plan as text for a terminal."""

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from lightning_modules.commands.plan.hardware import Range
from lightning_modules.commands.plan.memory import CONTEXT_GIB, FRAGMENTATION
from lightning_modules.commands.plan.transfers import BANDWIDTH
from lightning_modules.visualization.report import Table, as_text_table

WIDTH = 118


def report(plan: dict[str, Any]) -> str:
    """Format a plan section by section, with units."""
    memory, scoring = _format_memory(plan["memory"]), _format_scoring(plan["scoring"])
    sections = (_format_header(plan), _format_training(plan), memory, scoring, _format_basis(plan))
    return "\n\n".join("\n".join(section) for section in sections)


def _format_header(plan: dict[str, Any]) -> Iterator[str]:
    model, gpu, run = plan["model"], plan["gpu"], plan["run"]
    steps = "" if run["max_steps"] is None else f", {run['max_steps']:,} steps"
    yield f"PLAN for {model['name']} ({model['model_type']})"
    yield f"  model  {_format_size(model['parameters'])}, {model['layers']} layers, vocabulary {model['vocabulary']:,}"
    if model["trained_parameters"] < model["parameters"]:
        yield f"         {_format_size(model['trained_parameters'])} trained"
    yield (
        f"  run    {run['objective']} (K={run['context_length']}, d={run['stride']}), sequences of {run['tokens']:,}"
        f" tokens, {run['rows_per_step']} per step{steps}"
    )
    sharding = "weights, gradients and optimizer sharded (FSDP2)" if run["sharded"] else "everything on each GPU"
    yield (
        f"         {run['precision']}, {run['dtype'].removeprefix('torch.')} weights, gradient checkpointing"
        f" {run['checkpointing']}, {run['optimizer']}, {sharding}"
    )
    yield f"  GPU    {gpu['count']} x {gpu['name']}: {gpu['tflops']:g} TFLOP/s at peak, {gpu['memory']:g} GiB"
    yield from (_wrap_line(f"note: {note}") for note in plan["notes"])


def _format_training(plan: dict[str, Any]) -> Iterator[str]:
    yield "TRAINING: TFLOP per sequence, LongCE compared to cross entropy (CE), and time per optimizer step"
    columns = {
        "K / d": lambda row: (
            f"{row['context_length']} / {row['stride'] or 'sliding'}{' *' if row['configured'] else ''}"
        ),
        "CE TFLOP": lambda row: f"{row['ce_tflop']:,.4g}",
        "short pass TFLOP": lambda row: f"{row['short_pass_tflop']:,.4g}",
        "LongCE over CE": lambda row: _format_overhead(row["overhead"]),
        "paper, measured": lambda row: _format_overhead(row["paper_overhead"]),
        "LongCE step": lambda row: format_duration(row["longce_step_seconds"]),
    }
    if plan["training"]:
        yield _format_table(columns, plan["training"])
        yield "  * as configured"
    for name, cost in plan["cost"].items():
        text = f"{format_duration(cost['step_seconds'])} per step, {format_number(cost['tokens_per_second'])} tokens/s"
        if cost["hours"] is not None:
            text += f", {plan['run']['max_steps']:,} steps: {format_number(cost['hours'])} h"
            text += f", {format_cost(cost['gpu_hours'], cost['price'])}"
        yield _wrap_line(f"{name}: {text}")
    if cost["transfer_seconds"]:
        listed = ", ".join(f"{name} {format_number(value)} s" for name, value in cost["transfer_seconds"].items())
        yield _wrap_line(f"of which transfers: {listed}")


def _format_memory(memory: dict[str, Any]) -> Iterator[str]:
    yield f"MEMORY OF TRAINING on each GPU: {_format_fit(memory)}"
    for name, size in memory["lasting"].items():
        yield f"  {size:8.2f} GiB  {name}"
    for phase, parts in memory["phases"].items():
        listed = ", ".join(f"{size:.2f} {name}" for name, size in parts.items())
        largest = "+" if phase == memory["largest_phase"] else " "
        yield _wrap_line(f"{largest} {sum(parts.values()):6.2f} GiB  in phase '{phase}': {listed}", hanging=16)
    yield f"  {memory['peak']:8.2f} GiB  peak: phases are sequential, so only the largest (+) counts"
    if memory["main_memory"]:
        yield f"  {memory['main_memory']:8.2f} GiB  in the main memory of each node"


def _format_scoring(scoring: dict[str, Any]) -> Iterator[str]:
    yield (
        f"SCORING a document of {scoring['document_tokens']:,} tokens on one GPU (LongPPL,"
        f" K={scoring['context_length']}, d={scoring['stride']})"
    )
    columns = {
        "": lambda row: row["pass"],
        "TFLOP": lambda row: f"{row['tflop']:,.4g}",
        "time": lambda row: format_duration(row["seconds"]),
        "over one pass": lambda row: _format_overhead(row["overhead"]),
    }
    yield _format_table(columns, scoring["passes"])
    if (evaluator := scoring.get("evaluator")) is not None:
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
    yield from map(
        _wrap_line,
        (
            "Computed: FLOPs of all matrix products and of causal attention, from the modules of the model; bytes of"
            " activations, from running the model on tensors without data, with flash attention.",
            *([f"Measured ({rates['source']}): {measured}."] if measured else []),
            f"Assumed, not measured on a GPU: {', '.join(texts.values())}.",
            f"Transfers: {BANDWIDTH:.0%} of {gpu['link']:g} GB/s within a node, {gpu['network']:g} GB/s per"
            f" GPU between nodes, {gpu['host']:g} GB/s to main memory. They overlap with computation completely, or not"
            " at all; an exchange of Ulysses and offloaded activations never do.",
            "Not included: data loading, validation, checkpoints, and the optimizer on a GPU.",
            "The paper's column is wall-clock time of the authors' code (Table 7: Llama-2-7B, 32k tokens).",
        ),
    )


def _format_table(columns: dict[str, Callable[[Any], str]], rows: list[Any]) -> str:
    cells = [[format_cell(row) for format_cell in columns.values()] for row in rows]
    return textwrap.indent(as_text_table(Table([*columns], cells)), "  ")


def _format_overhead(overhead: float | None) -> str:
    return "" if overhead is None else f"{overhead:+.0%}"


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


def _wrap_line(text: str, hanging: int = 4) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=" " * hanging)
