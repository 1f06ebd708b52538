"""Verdict of a comparison, in words and as a picture: which run is better, on what, and with what certainty."""

from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

from lightning_modules.utilities.statistics import RUNS
from lightning_modules.visualization.images import COLORS, INK, STYLE, as_svg
from longce.compare.ratios import NAMES, OF_ALL_TOKENS, OF_KEY_TOKENS, Ratio
from longce.compare.runs import AXES, Cell, ComparedRun
from longce.compare.tables import format_amount

DRAWN = (1e-3, 1e3)
"""Ratios that a picture shows: not those of a model that has diverged."""

_NOTED_COST = 1.1
"""Ratio of device hours that is worth a sentence; smaller ones are noise of the machine."""


def write_verdict(
    runs: Sequence[ComparedRun], baseline: ComparedRun, ratios: Sequence[Ratio], names: Mapping[Cell, str]
) -> list[str]:
    """Return sentences on which run is better, with the ratios to the baseline and the names of their cells."""
    sentences = []
    for run in runs:
        of_key = _select_ratios(ratios, run.name, OF_KEY_TOKENS)
        of_all = _select_ratios(ratios, run.name, OF_ALL_TOKENS)
        if of_key:
            sentences.append(_judge_key_tokens(run.name, baseline.name, of_key, names))
        elif of_all:
            sentences.append(f"`{run.name}` and `{baseline.name}` had no evaluator, or share no key tokens.")
        if of_all:
            sentences.append(_judge_all_tokens(of_all))
    if not sentences:
        return []
    for run in runs:
        identity = run.config.get("model.identity")
        if identity is not None and identity == run.config.get("evaluator.identity"):
            sentences.append(
                f"`{run.name}` is itself the evaluator, which favors it: key tokens are ones that the evaluator"
                " predicts well."
            )
    return [*sentences, *_compare_training(runs), *_describe_intervals(runs, ratios)]


def _select_ratios(ratios: Sequence[Ratio], run: str, kinds: Sequence[str]) -> list[Ratio]:
    return [ratio for ratio in ratios if ratio.run == run and ratio.kind in kinds]


def _judge_key_tokens(name: str, baseline: str, ratios: Sequence[Ratio], names: Mapping[Cell, str]) -> str:
    """Return a sentence on key tokens, which need the long context."""
    outcomes = Counter(ratio.outcome for ratio in ratios)
    if outcomes["better"] and outcomes["worse"]:
        claim = f"Whether `{name}` predicts key tokens better than `{baseline}` depends on the evaluation"
    elif outcomes["better"]:
        claim = f"`{name}` predicts key tokens better than `{baseline}`"
    elif outcomes["worse"]:
        claim = f"`{name}` predicts key tokens worse than `{baseline}`"
    elif outcomes["tie"]:
        claim = f"`{name}` and `{baseline}` cannot be told apart on key tokens"
    elif not any(ratio.documents for ratio in ratios):
        claim = f"`{name}` was compared with `{baseline}` without records by document"
    else:
        claim = f"`{name}` and `{baseline}` were compared on too few documents to tell"
    first = ratios[0]
    if len(ratios) > 1:
        return f"{claim}: the ratio of {NAMES[first.kind]} is {_describe_ratios(ratios)}."
    over = ""
    if first.documents:
        unit = "tokens" if first.kind == "longppl" else "bytes"
        over = f", over {first.documents:,} documents with {first.units:,} key {unit}"
    return f"{claim}: the ratio of {NAMES[first.kind]} is {first}{over} ({names[first.cell]})."


def _judge_all_tokens(ratios: Sequence[Ratio]) -> str:
    """Return a sentence on all tokens, which hardly need the long context."""
    # Most evaluators and thresholds repeat the number of a set.
    by_number = {(ratio.cell.set, ratio.value, ratio.interval): ratio for ratio in ratios}
    distinct = list(by_number.values())
    metric = NAMES[distinct[0].kind]
    if len(distinct) > 1:
        return f"The ratio of {metric}, over all tokens, is {_describe_ratios(distinct)}."
    if distinct[0].outcome == "unknown":
        return f"The ratio of {metric}, over all tokens, is {distinct[0]}."
    meaning = {"better": "better", "worse": "worse", "tie": "no difference is shown"}
    return f"The ratio of {metric}, over all tokens, is {distinct[0]}: {meaning[distinct[0].outcome]}."


def _describe_ratios(ratios: Sequence[Ratio]) -> str:
    lowest = min(ratios, key=lambda ratio: ratio.value)
    highest = max(ratios, key=lambda ratio: ratio.value)
    values = str(lowest)
    if str(highest) != values:
        values = f"from {lowest} to {highest}"
    outcomes = Counter(ratio.outcome for ratio in ratios)
    return (
        f"{values} in {len(ratios)} evaluations, better in {outcomes['better']} and worse in {outcomes['worse']} of"
        " them"
    )


def _compare_training(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence for each measure of the training that differs."""
    sentences = []
    for axis, scalar in AXES.items():
        tolerance = _NOTED_COST if axis == "device hours" else 1.0
        last = {}
        amounts = {}
        for run in runs:
            values = run.scalars.get(scalar)
            if values:
                last[run.name] = max(values.values())
                amounts[run.name] = format_amount(last[run.name])
        # Means of a group are fractions, which may be equal when they are rounded.
        if len(set(amounts.values())) > 1 and max(last.values()) > tolerance * min(last.values()):
            described = ", ".join(f"`{name}` {amount}" for name, amount in amounts.items())
            sentences.append(f"They differ in {axis}: {described}.")
    return sentences


def _describe_intervals(runs: Sequence[ComparedRun], ratios: Sequence[Ratio]) -> list[str]:
    """Return what the intervals are about, such as the seeds of trained runs, or why there are none."""
    if not any(ratio.documents for ratio in ratios):
        return ["There are no intervals, as the runs have no records by document: differences may be due to chance."]
    if all(ratio.interval is None for ratio in ratios):
        return []
    text = "Intervals (95%) cover the choice of documents"
    tables: list[pd.DataFrame] = []
    for run in runs:
        tables += [run.last(cell)[1] for cell in run.evaluations]
    if any(RUNS in table and (table[RUNS] > 1).all() for table in tables):
        text += " and the seeds of the runs"
    elif any(run.scalars.get("step") for run in runs):
        text += "; another seed of the training may change more"
    return [f"{text}."]


@matplotlib.rc_context(STYLE)
def draw_ratios(ratios: Sequence[Ratio], names: Mapping[Cell, str]) -> str:
    """Draw the ratios and their intervals as SVG text, on a log axis: a labeled line for each evaluation and run."""
    several = len({ratio.run for ratio in ratios}) > 1
    lines: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        label = names[ratio.cell]
        if several:
            label = f"{ratio.run} · {label}"
        lines.setdefault(label, []).append(ratio)
    figure = Figure(figsize=(4.4, 0.75 + 0.42 * len(lines)), layout="constrained")
    plot = figure.subplots()
    plot.set_xscale("log")
    plot.grid(visible=False)  # its lines would cross the labels
    kinds = list(dict.fromkeys(ratio.kind for ratio in ratios))
    for place, (label, own) in enumerate(lines.items()):
        plot.text(0, -place + 0.32, label, transform=plot.get_yaxis_transform(), va="center")
        plot.plot((1, 1), (-place - 0.4, -place + 0.12), color=INK, linewidth=0.8)  # not across the labels
        for ratio in own:
            color = COLORS[kinds.index(ratio.kind)]
            height = -place - 0.22 * kinds.index(ratio.kind)
            face = color if ratio.outcome in ("better", "worse") else "none"
            plot.plot(ratio.value, height, "o", color=color, markersize=5, markerfacecolor=face)
            if ratio.interval is not None:
                plot.plot(ratio.interval, (height, height), color=color, linewidth=1.6)
    low, high = plot.get_xlim()
    low = max(low, DRAWN[0])
    high = min(high, DRAWN[1])
    plot.set_xlim(low, high)
    plot.xaxis.set(major_locator=_place_ticks(low, high), minor_locator=NullLocator(), major_formatter="{x:g}")
    plot.set_yticks([])
    plot.set_ylim(-len(lines) + 0.4, 0.6)
    plot.spines["left"].set_visible(False)
    plot.set_xlabel("← better (ratio to the baseline) worse →")
    for color, kind in zip(COLORS, kinds, strict=False):
        plot.plot([], [], "o-", color=color, markersize=5, label=NAMES[kind])
    figure.legend(loc="outside upper left", ncols=len(kinds))
    return as_svg(figure)


def _place_ticks(low: float, high: float) -> Locator:
    """Return where an axis of ratios has ticks: at multiples of steps that include 1, a tie."""
    if high < 4 * low:
        return MaxNLocator(4, steps=[1, 2, 5, 10])
    if high < 100 * low:
        return LogLocator(subs=(1, 2, 5))
    return LogLocator(subs=(1,))
