"""A plan as text for a terminal."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 118
REMEDIES = 10
"""Lines of remedies that a reader takes in; the file holds all."""


def report(plan: dict[str, Any]) -> str:
    """One or two screens: the run, its time, its memory, scoring, and what all that rests on."""
    sections = [_header(plan), _training(plan), _memory(plan), _scoring(plan), _basis(plan)]
    return "\n\n".join("\n".join(section) for section in sections)


def _header(plan: dict[str, Any]) -> Iterator[str]:
    model, run, gpu = plan["model"], plan["run"], plan["gpu"]
    trained = "" if model["trained_parameters"] == model["parameters"] else _trained(model)
    yield f"Plan for {model['name']} ({model['model_type']})"
    yield (
        f"  model  {_count(model['parameters'])} parameters{trained}, {model['layers']} layers, vocabulary"
        f" {model['vocabulary']:,}; {_count(model['weights_per_token'])} weights at work per token"
    )
    yield (
        f"  run    {_objective(run)}, rows of {run['row_tokens']:,} tokens, {run['rows_per_step']} rows per step,"
        f" {run['max_steps'] or 'no number of'} steps"
    )
    yield (
        f"         {run['precision']} with {run['weights']} weights, gradient checkpointing {run['checkpointing']},"
        f" {run['optimizer']}; {run['strategy']}"
    )
    yield f"  GPU    {gpu['count']} x {gpu['name']}: {gpu['tflops']:g} TFLOP/s bfloat16 at peak, {gpu['memory']:g} GiB"
    for note in plan["notes"]:
        yield f"  NOTE   {note}"
    if run["weights"] == "float32" and run["precision"].startswith("32"):
        yield "  NOTE   times are those of bfloat16 products: float32 ones run at a fraction of that rate"


def _trained(model: dict[str, Any]) -> str:
    return f" ({_count(model['trained_parameters'])} trained)"


def _objective(run: dict[str, Any]) -> str:
    if run["stored_influence"]:
        return f"{run['objective']} with stored weights (no short contexts)"
    if not run["short_pass"]:
        return str(run["objective"])
    share = "" if run["short_window_share"] == 1 else f", {run['short_window_share']:.0%} of the windows"
    return f"{run['objective']} (K={run['context_length']}, d={run['stride']}{share})"


def _training(plan: dict[str, Any]) -> Iterator[str]:
    yield "TRAINING: TFLOP of a row, LongCE over cross entropy (CE), and time of a step"
    rows = [
        (
            "K / d",
            "CE",
            "short pass",
            "LongCE",
            "authors' code",
            "paper, 7B",
            "step ours/authors'",
            "CE step",
            "LongCE step",
        ),
        ("", "TFLOP", "TFLOP", "over CE", "over CE", "measured", "by FLOPs", "", ""),
    ]
    rows += [
        (
            f"{pair['context_length']} / {pair['stride']}{' *' if pair['configured'] else ''}",
            f"{pair['ce_tflop']:,.4g}",
            f"{pair['short_pass_tflop']:,.4g}",
            _percent(pair["overhead"]),
            _percent(pair["authors_overhead"]),
            _percent(pair["paper_overhead"]),
            f"{pair['step_to_authors']:.2f}",
            _time(pair["ce_step_seconds"]),
            _time(pair["longce_step_seconds"]),
        )
        for pair in plan["training"]
    ]
    yield from _table(rows)
    if any(pair["configured"] for pair in plan["training"]):
        yield "  * as configured"
    for name, bill in plan["cost"].items():
        yield f"  {name:<14}{_bill(bill, plan)}"
    if any(pair["paper_overhead"] for pair in plan["training"]):
        yield from _wrapped(
            "The paper's column is wall-clock time (Table 7: Llama-2-7B, 32k). It is 1.1 to 1.5 times what FLOPs say of"
            " the authors' code on that model with checkpointing, most for small windows. Inferred, not shown: each"
            " window costs something by itself (gathering divided weights, smaller products, float32 logits of all its"
            " K+d tokens), which no figure here includes."
        )


def _bill(bill: dict[str, Any], plan: dict[str, Any]) -> str:
    parts = [f"{_time(bill['step_seconds'])} a step", f"{bill['tokens_per_second']:,.0f} tokens/s"]
    if bill["hours"] is not None:
        steps = plan["run"]["max_steps"]
        parts.append(f"{steps} steps: {bill['hours']:,.2f} h, {bill['gpu_hours']:,.1f} GPU-hours")
    if bill["price"] is not None:
        parts.append(f"price {bill['price']:,.2f}")
    elif bill["price_per_step"] is not None:
        parts.append(f"price {bill['price_per_step']:,.4f} a step")
    return ", ".join(parts)


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    memory, gpu = plan["memory"], plan["gpu"]
    yield f"MEMORY OF TRAINING, GiB on each GPU: {_verdict(memory, gpu)}"
    for name, size in memory["lasting"].items():
        yield f"  {size:8.2f}  {name}"
    phases = sorted(memory["phases"].items(), key=lambda phase: -sum(phase[1].values()))
    for name, parts in phases:
        mark = "+" if name == memory["largest_phase"] else " "
        inside = ", ".join(f"{size:.2f} {part}" for part, size in parts.items())
        yield from _wrapped(f"{mark}{sum(parts.values()):7.2f}  in phase '{name}': {inside}", indent="            ")
    yield f"  {memory['peak']:8.2f}  peak (phases follow one another: only the largest, +, counts)"
    yield f"  {memory['allowance']:8.2f}  allowance for CUDA context and fragmentation (assumed)"
    if not memory["fits"]:
        yield from _remedies(memory["remedies"])


def _verdict(memory: dict[str, Any], gpu: dict[str, Any]) -> str:
    verdict = "FITS" if memory["fits"] else "DOES NOT FIT"
    return f"{memory['needed']:.1f} of {gpu['memory']:g} GiB, {verdict}"


def _remedies(remedies: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not remedies:
        yield "  No single change and no pair of changes that was tried makes it fit."
        return
    yield "  What would make it fit (each line alone is enough):"
    for remedy in remedies[:REMEDIES]:
        yield f"  {remedy['needed']:8.1f}  {' and '.join(remedy['changes'])}"
    if len(remedies) > REMEDIES:
        yield f"            .. and {len(remedies) - REMEDIES} more (--output FILE holds all)"


def _scoring(plan: dict[str, Any]) -> Iterator[str]:
    scoring, gpu = plan["scoring"], plan["gpu"]
    yield (
        f"SCORING a document of {scoring['document_tokens']:,} tokens on one GPU"
        f" (LongPPL, K={scoring['context_length']}, d={scoring['stride']})"
    )
    rows: list[tuple[str, ...]] = [("", "TFLOP", "time", "over one pass", "authors' code", "floor, TFLOP")]
    plain = scoring["plain_pass"]
    rows.append(("perplexity: one pass", f"{plain['tflop']:,.4g}", _time(plain["seconds"]), "", "", ""))
    if "with_evaluator" in scoring:
        rows.append(_scored(f"evaluator {scoring['evaluator']['name']}", scoring["with_evaluator"]))
    rows.append(_scored("evaluator == model", scoring["evaluator_is_model"]))
    yield from _table(rows)
    if validation := scoring.get("validation"):
        yield (
            f"  a validation of {validation['documents']} such documents on {gpu['count']} GPU(s):"
            f" {_time(validation['first_seconds'])} the first time, {_time(validation['later_seconds'])} later"
        )
    if "with_evaluator" in scoring:
        yield f"  memory: evaluator {_verdict(scoring['evaluator_memory'], gpu)}; then it is freed"
        yield f"  memory: model {_verdict(scoring['model_memory'], gpu)}"
        yield f"  memory: evaluator within a fit, beside the training {_verdict(scoring['validation_memory'], gpu)}"
        if not scoring["evaluator_memory"]["fits"]:
            yield "    a smaller evaluator, its `dtype: bfloat16`, shorter documents or a larger card would help."
        elif not scoring["validation_memory"]["fits"]:
            yield "    `longce validate` with this config first stores the evaluator's scores, so that fit loads none."
        yield from _wrapped(
            "The evaluator's scores are stored: later validations, thresholds and models cost the one pass. For a"
            f" document of this kind the paper measured {_percent(scoring['paper_overhead'])} over one pass (Table 12:"
            " evaluator Llama-3.1-8B, model Mistral-7B), less than FLOPs say of the authors' code. Inferred, not shown:"
            " their plain pass made less use of the GPU."
        )
    else:
        yield f"  memory: {_verdict(scoring['model_memory'], gpu)}. --evaluator NAME plans one."


def _scored(name: str, work: dict[str, Any]) -> tuple[str, ...]:
    overhead, authors = _percent(work["overhead"]), _percent(work["authors_overhead"])
    return (
        name[-40:],
        f"{work['tflop']:,.4g}",
        _time(work["seconds"]),
        overhead,
        authors,
        f"{work['floor_tflop']:,.4g}",
    )


def _basis(plan: dict[str, Any]) -> Iterator[str]:
    assumed = plan["assumed"]
    yield "WHAT THIS RESTS ON"
    yield from _wrapped(
        "Computed: operations of all matrix products and of causal attention, from the modules of the model; bytes of"
        " activations from running it on tensors without data, with flash attention. Nothing was measured on a GPU."
    )
    yield from _wrapped(
        f"Assumed: {assumed['gemm']:.0%} of the peak rate in matrix products, {assumed['attention']:.0%} in flash"
        f" attention forward and {assumed['attention_backward']:.0%} backward; no time for anything else (norms,"
        " optimizer, data, communication, validation), so that real steps are slower; data-parallel scaling without"
        f" loss; one document per row; {assumed['context_gib']:g} GiB for the CUDA context and"
        f" {assumed['fragmentation']:.0%} of the peak for fragmentation; the card's memory as programs find it."
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        yield ("  " + "  ".join(cells)).rstrip()


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=indent)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.0%}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,}"


def _time(seconds: float) -> str:
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:,.0f} min"
