"""A plan as text for a terminal."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

WIDTH = 118
_FORMATS: Any = {
    "GiB": "{:.2f}".format,
    "overhead": "{:+.0%}".format,
    "paper_overhead": "{:+.0%}".format,
    "configured": {True: "*", False: ""}.get,
}


def report(plan: Mapping[str, Any]) -> str:
    """Format a plan section by section: tables of the numbers by the names that they have in JSON."""
    run, memory, scoring = plan["run"], plan["memory"], plan["scoring"]
    costs = [{"": name, **bill} for name, bill in plan["cost"].items()]
    parts = [
        {"phase": phase, "GiB": size, "part": part}
        for phase, found in {"all": memory["lasting"], **memory["phases"]}.items()
        for part, size in found.items()
    ]
    lines = [
        f"PLAN for {plan['model']['name']} on {plan['gpu']['count']} x {plan['gpu']['name']}",
        *(_list(plan[name]) for name in ("model", "gpu", "run")),
        *(_wrap(f"note: {note}") for note in plan["notes"]),
        "\nTRAINING: TFLOP of a sequence, LongCE over cross entropy (CE), and time of a step (* as configured)",
        _table(plan["training"]),
        f"\nCOST of {run['max_steps'] or 'unlimited'} steps",
        _table(costs),
        f"\nMEMORY OF TRAINING on each GPU: {_fit(memory)}",
        _table(parts),
        _wrap(
            f"peak {memory['peak']:.2f} GiB: phases follow one another, and only the largest counts"
            f" ('{memory['largest_phase']}')"
        ),
        *(_wrap(f"would fit with {each['change']}: {each['needed']:.1f} GiB") for each in memory.get("remedies", ())),
        f"\nSCORING a document of {scoring['document_tokens']:,} tokens on one GPU (LongPPL,"
        f" K={scoring['context_length']}, d={scoring['stride']})",
        _table(scoring["passes"]),
        *(_list(scoring[name]) for name in ("evaluator", "validation") if name in scoring),
        *(f"  memory of the {name}: {_fit(needed)}" for name, needed in scoring["memory"].items()),
        "\nWHAT THIS RESTS ON",
        _list(plan["assumed"]),
        *map(_wrap, plan["basis"]),
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "  none"
    table = pd.DataFrame(rows).dropna(axis="columns", how="all")
    text = table.to_string(index=False, na_rep="", float_format="{:,.4g}".format, formatters=_FORMATS)
    return textwrap.indent(text, "  ")


def _list(values: Mapping[str, Any]) -> str:
    forms = {int: "{:,}", float: "{:,.4g}"}
    return _wrap(", ".join(f"{name} {forms.get(type(value), '{}').format(value)}" for name, value in values.items()))


def _fit(memory: Mapping[str, Any]) -> str:
    fits = "fits" if memory["fits"] else "DOES NOT FIT"
    return f"{memory['needed']:.1f} of {memory['available']:g} GiB, {fits}"


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
