"""Verdict of a comparison, in words and as a picture: which run is better, on what, and with what certainty."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightning_modules.utilities.statistics import RUNS, UNITS, Interval, paired_ratio
from lightning_modules.visualization.images import COLORS, INK, STYLE, as_svg
from longce.compare.ratios import compared_kinds, shared_documents
from longce.compare.runs import AXES, Cell, ComparedRun, has_documents

NAMES = {
    "longppl": "LongPPL",
    "perplexity": "perplexity",
    "key_bits_per_byte": "key bits per byte",
    "bits_per_byte": "bits per byte",
}
_SMALLEST = 1e-3
"""Ratio from which a picture shows it."""
_WIDTH = 4.4
"""Width of the picture in inches."""
_NOTED_COST = 1.1
"""Ratio of device hours that is worth a sentence; smaller ones are noise of the machine."""
_SETTINGS = 3
"""Differing settings that the verdict names."""

Outcome = Literal["better", "worse", "tie", "unknown"]


class Ratio(NamedTuple):
    """A run's number over the baseline's, over the documents that both have."""

    cell: Cell
    run: str
    kind: str  # of `NAMES`
    value: float
    interval: Interval | None
    documents: int  # 0 if the runs have no records by document
    units: int  # tokens or bytes that the run's number is over
    total: int = 0  # documents that both have, including those without such units

    @property
    def outcome(self) -> Outcome:
        """Whether the interval excludes a tie."""
        if self.value in (0, math.inf):  # one of the models has diverged
            return "better" if self.value == 0 else "worse"
        if self.interval is None:
            return "unknown"
        return "better" if self.interval[1] < 1 else "worse" if self.interval[0] > 1 else "tie"

    def __str__(self) -> str:
        if self.value in (0, math.inf):
            return f"infinite for the {'baseline' if self.value == 0 else 'run'}"
        if self.documents == 0:
            return f"{_describe_change(self.value)} (no interval, because the runs have no records by document)"
        if self.interval is None:
            count = f"{self.documents} document{'s' if self.documents > 1 else ''}"
            return f"{_describe_change(self.value)} ({count}: too few for an interval)"
        between = " to ".join(map(_format_ratio, self.interval))
        ratio = f"ratio {_format_ratio(self.value)}, " if 0.5 <= self.value <= 2 else ""
        return f"{_describe_change(self.value)} ({ratio}95% interval {between})"


def measure_ratios(runs: Sequence[ComparedRun], baseline: ComparedRun) -> list[Ratio]:
    """Return the ratios of the last evaluations: of key tokens first, then of all tokens, where both runs have some."""
    found = []
    for cell in sorted(baseline.evaluations, key=str):
        reference = baseline.last(cell)[1]
        own = {run.name: run.last(cell)[1] for run in runs if cell in run.evaluations and run is not baseline}
        kinds = compared_kinds([reference, *own.values()])
        for name, documents in own.items():
            shared = shared_documents(documents, reference, kinds[:2])
            for kind in kinds[-2:]:
                counted = shared[shared[UNITS[kind]] > 0]
                value, interval = paired_ratio(shared, kind)
                if math.isnan(value):
                    continue
                if has_documents(shared):
                    units = int(counted[UNITS[kind]].sum())
                    found.append(Ratio(cell, name, kind, value, interval, len(counted), units, len(shared)))
                else:
                    found.append(Ratio(cell, name, kind, value, None, documents=0, units=0))
    return found


def write_verdict(runs: Sequence[ComparedRun], baseline: ComparedRun, differing: Sequence[Sequence[str]]) -> list[str]:
    """Write which run is better; ``differing`` are the settings that differ, with a value for each run."""
    ratios = measure_ratios(runs, baseline)
    sentences = []
    for run in runs:
        own = [ratio for ratio in ratios if ratio.run == run.name]
        if own:
            sentences.append(_judge(run.name, baseline.name, own))
    if not sentences:
        return []
    sentences += _name_own_evaluators(runs) + _compare_training(runs) + _name_settings(differing, runs)
    if any(ratio.interval is not None for ratio in ratios):
        sentences.append(f"Intervals (95%) cover the choice of documents{_describe_seeds(runs)}.")
    return sentences


def _describe_seeds(runs: Sequence[ComparedRun]) -> str:
    """Return whether the intervals are also about the seeds of trained runs."""
    if not any(run.scalars.get("step") for run in runs):
        return ""
    tables = [run.last(cell)[1] for run in runs for cell in run.evaluations]
    if any(RUNS in table and (table[RUNS] > 1).all() for table in tables):
        return " and the seeds of the runs"
    return "; another seed of the training may change more"


def _judge(name: str, baseline: str, ratios: Sequence[Ratio]) -> str:
    """Describe the ratios of one run: key tokens first, because they need the long context."""
    of_key = [ratio for ratio in ratios if ratio.kind in ("longppl", "key_bits_per_byte")]
    of_all = [ratio for ratio in ratios if ratio not in of_key]
    if not of_key:
        return f"`{name}` and `{baseline}` had no evaluator, or share no key tokens. {_judge_all_tokens(of_all)}"
    if len(of_key) > 1:
        return f"{_judge_cells(name, baseline, of_key)} {_judge_all_tokens(of_all)}"
    (ratio,) = of_key
    place = ratio.cell.short
    if ratio.documents == 0:
        claim = f"`{name}` compared with `{baseline}` ({place})"
        return f"{claim}: {_name_with_verb(ratio.kind)} {ratio}. {_judge_all_tokens(of_all)}"
    claim = {
        "better": f"`{name}` predicts key tokens better than `{baseline}`",
        "worse": f"`{name}` predicts key tokens worse than `{baseline}`",
        "tie": f"`{name}` and `{baseline}` cannot be told apart on key tokens",
        "unknown": f"`{name}` and `{baseline}` were compared on too few documents to tell",
    }[ratio.outcome]
    units = f"{ratio.units:,} key {'tokens' if ratio.kind == 'longppl' else 'bytes'}"
    over = f"{ratio.documents:,} documents with {units}"
    if ratio.documents < ratio.total:
        over = f"{units} of {ratio.documents:,} of {ratio.total:,} documents, because the others have no key tokens"
    return f"{claim}: {_name_with_verb(ratio.kind)} {ratio}, over {over} ({place}). {_judge_all_tokens(of_all)}"


def _judge_cells(name: str, baseline: str, ratios: Sequence[Ratio]) -> str:
    """Describe the ratios of several sets, evaluators and thresholds together."""
    counts = Counter(ratio.outcome for ratio in ratios)
    better = counts["better"]
    worse = counts["worse"]
    total = len(ratios)
    if better and not worse:
        claim = f"`{name}` predicts key tokens better than `{baseline}`"
    elif worse and not better:
        claim = f"`{name}` predicts key tokens worse than `{baseline}`"
    elif better:
        claim = f"Whether `{name}` predicts key tokens better than `{baseline}` depends on the evaluation"
    else:
        claim = f"`{name}` and `{baseline}` cannot be told apart on key tokens"
    values = [ratio.value for ratio in ratios]
    between = f"{_format_ratio(min(values))} to {_format_ratio(max(values))}"
    return (
        f"{claim}: of {total} evaluations, {better} show it better and {worse} worse, and {total - better - worse} do"
        f" not tell; {_name_with_verb(ratios[0].kind)} {between} times as large (lower is better),"
        f" {_describe_sizes(ratios)}. Each evaluation is one set of documents, with key tokens found by one evaluator"
        " (another model) at one pair of thresholds."
    )


def _describe_sizes(ratios: Sequence[Ratio]) -> str:
    """Return how many documents with key tokens the evaluations have."""
    documents = [ratio.documents for ratio in ratios]
    smallest = min(documents)
    largest = max(documents)
    if largest == 0:
        return "without intervals, because the runs have no records by document"
    sizes = f"{largest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    return f"each over {sizes} document{'s' if largest > 1 else ''} with key tokens"


def _judge_all_tokens(ratios: Sequence[Ratio]) -> str:
    """Return one sentence on all tokens, which hardly need the long context."""
    # Most evaluators and thresholds repeat the number of a set.
    distinct = list({(ratio.cell.set, ratio.value, ratio.interval): ratio for ratio in ratios}.values())
    if not distinct:
        return ""
    name = NAMES[distinct[0].kind].capitalize()
    verb = _name_with_verb(distinct[0].kind).rpartition(" ")[2]
    meaning = {"better": "better", "worse": "worse", "tie": "no difference is shown", "unknown": "too few documents"}
    if distinct[0].documents == 0:
        meaning["unknown"] = "it may be due to chance"
    outcomes = dict.fromkeys(ratio.outcome for ratio in distinct)
    judged = meaning[distinct[0].outcome]
    if len(outcomes) > 1:
        sets = Counter(ratio.cell.set for ratio in distinct)
        places: dict[Outcome, list[str]] = {outcome: [] for outcome in outcomes}
        for ratio in distinct:
            name_of_set = ratio.cell.set
            places[ratio.outcome].append(name_of_set if sets[name_of_set] == 1 else f"({ratio.cell.short})")
        judged = "; ".join(f"{meaning[outcome]} on {', '.join(names)}" for outcome, names in places.items())
    values = [ratio.value for ratio in distinct]
    between = f"{_format_ratio(min(values))} to {_format_ratio(max(values))} times as large"
    same = len({(ratio.value, ratio.interval) for ratio in distinct}) == 1
    return f"{name}, over all tokens, {verb} {distinct[0] if same else between}: {judged}."


def _name_own_evaluators(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence for each scored model that found the key tokens itself."""
    identities = {run.name: (run.config.get("model.identity"), run.config.get("evaluator.identity")) for run in runs}
    return [
        f"`{name}` is itself the evaluator, which favors it: key tokens are ones that the evaluator predicts well."
        for name, (model, evaluator) in identities.items()
        if model is not None and model == evaluator
    ]


def _name_with_verb(kind: str) -> str:
    return f"{NAMES[kind]} {'are' if 'bits' in NAMES[kind] else 'is'}"


def _compare_training(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence if the runs were trained unequally."""
    unequal = []
    for axis, scalar in AXES.items():
        last = {run.name: max(run.scalars[scalar].values()) for run in runs if run.scalars.get(scalar)}
        if axis != "device hours" and len({round(value) for value in last.values()}) > 1:
            values = ", ".join(f"`{name}` {value:,.0f}" for name, value in last.items())
            unequal.append(f"{axis} ({values})")
    sentences = [f"They were not trained equally: {' and '.join(unequal)}."] if unequal else []
    hours = {
        run.name: max(run.scalars["train/gpu_hours"].values()) for run in runs if run.scalars.get("train/gpu_hours")
    }
    if hours and max(hours.values()) > _NOTED_COST * min(hours.values()):
        values = ", ".join(f"`{name}` {value:.3g}" for name, value in hours.items())
        sentences.append(f"They did not cost the same: device hours are {values}.")
    return sentences


def _name_settings(differing: Sequence[Sequence[str]], runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence on the settings that differ, the model's first, with the value of each run by name."""
    if not differing:
        return []
    names = [run.name for run in runs if run.config] or [run.name for run in runs]
    ordered = sorted(differing, key=lambda row: not row[0].startswith("model."))
    named = []
    for setting, *values in ordered[:_SETTINGS]:
        pairs = [f"`{name}`: {_shorten(value)}" for name, value in zip(names, values, strict=True)]
        named.append(f"`{setting}` ({'; '.join(pairs)})")
    rest = len(ordered) - len(named)
    more = f" and {rest} more setting{'s' if rest > 1 else ''} (below)" if rest else ""
    return [f"They differ in {', '.join(named)}{more}."]


def _shorten(value: str) -> str:
    """Return a class without its modules, and at most 30 characters of other values."""
    value = (
        value.rpartition(".")[2] if value.startswith(("lightning_modules.", "callbacks.", "datamodules.")) else value
    )
    return f"{value[:29]}…" if len(value) > 30 else value or "absent"


def _describe_change(ratio: float) -> str:
    """Return a ratio as a change, in percent unless it is more than a factor of 2."""
    if abs(ratio - 1) < 0.0005:
        return "the same"
    if 0.5 <= ratio <= 2:
        return f"{abs(ratio - 1):.1%} {'lower' if ratio < 1 else 'higher'}"
    return f"{_format_ratio(ratio)} times as large"


def _format_ratio(value: float) -> str:
    return f"{value:.3f}" if 0.1 <= value < 2 else f"{value:.2f}" if 2 <= value < 100 else f"{value:.2g}"


def drawn_ratios(ratios: Sequence[Ratio]) -> list[Ratio]:
    """Return the ratios that a picture can show: not those of a model that has diverged."""
    return [ratio for ratio in ratios if _SMALLEST < ratio.value < 1 / _SMALLEST]


@matplotlib.rc_context(STYLE)
def draw_ratios(ratios: Sequence[Ratio]) -> str:
    """Draw the ratios and their intervals as SVG text, on a log axis: a labeled line for each evaluation and run."""
    lines: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        lines.setdefault(_label_ratio(ratio, ratios), []).append(ratio)
    figure = Figure(figsize=(_WIDTH, 0.75 + 0.42 * len(lines)), layout="constrained")
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
    _set_ratio_ticks(plot, [end for ratio in ratios for end in (ratio.value, *(ratio.interval or ()))] + [1.0])
    plot.set_yticks([])
    plot.set_ylim(-len(lines) + 0.4, 0.6)
    plot.spines["left"].set_visible(False)
    plot.set_xlabel("← better (ratio to the baseline) worse →")
    for color, kind in zip(COLORS, kinds, strict=False):
        plot.plot([], [], "o-", color=color, markersize=5, label=NAMES[kind])
    figure.legend(loc="outside upper left", ncols=len(kinds))
    return as_svg(figure)


def _set_ratio_ticks(plot: Axes, ends: Sequence[float]) -> None:
    """Set limits and ticks in plain numbers: round ones if the range is narrow, or 1, 2, 5 times powers of ten."""
    low = max(min(ends), _SMALLEST)
    high = min(max(ends), 1 / _SMALLEST)
    margin = max((high / low) ** 0.08, 1.01)
    plot.set_xlim(low / margin, high * margin)
    narrow = MaxNLocator(4).tick_values(low, high)
    wide = [digit * 10.0**power for power in range(-3, 4) for digit in ((1, 2, 5) if high / low < 100 else (1,))]
    apart = (high / low) ** 0.12  # of ticks, so that their labels do not touch
    ticks = [1.0] + [
        tick
        for tick in (narrow if high / low < 3 else wide)
        if low / margin <= tick <= high * margin and max(tick, 1 / tick) > apart
    ]
    plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    plot.minorticks_off()


def _label_ratio(ratio: Ratio, ratios: Sequence[Ratio]) -> str:
    """Label a ratio by its run, if there are several, and its evaluation."""
    parts = [ratio.run] if len({each.run for each in ratios}) > 1 else []
    return " · ".join([*parts, ratio.cell.short])
