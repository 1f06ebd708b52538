"""``longce correlate``: correlate perplexities with benchmark scores over models, and report which are left out."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from lightning_modules.commands.correlate.correlation import MIN_MODELS, Interval, bootstrap_interval, pearson, spearman
from lightning_modules.commands.correlate.models import choose_names, join
from lightning_modules.commands.correlate.result_files import read_results
from lightning_modules.utilities.files import writable_folder
from lightning_modules.visualization.images import as_svg
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_text_table, write_report

_HEAD = ("score", "metric", "models", "Pearson [95 %]", "Spearman [95 %]")
_STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "longce"}
_COLUMNS = 3  # of axes in a figure
_MARKERS = "osD^v<>pP*Xh"
_COLORS = 10  # of matplotlib's default cycle

Values = Mapping[str, Mapping[str, float]]  # by model and name


def correlate(
    files: Sequence[str],
    output: str,
    *,
    metrics: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    log_axis: bool = False,
) -> str:
    """Correlate LongPPL and perplexity of many models with their benchmark scores; options of ``longce correlate``.

    Returns:
        A table of the correlations with 95 % bootstrap intervals over models, and which models are left out, and why.

    Raises:
        ValueError: If a file cannot be read, a name is unknown, two files contradict each other, or no pair of
            perplexity and score has at least three models.
    """
    models = join(read_results(files))
    values = models.values
    chosen, against = choose_names(metrics, models, "metrics"), choose_names(scores, models, "scores")
    pairs = [_pair(values, metric, score) for score in against for metric in chosen]
    _check_enough(pairs)
    folder = writable_folder(Path(output).expanduser(), remedy="Name another one by `--output`.")
    names = _file_names(against)
    pictures = {
        names[score]: _scatter([pair for pair in pairs if pair.score == score], values, log_axis) for score in against
    }
    table = Table(_HEAD, [_row(pair) for pair in pairs])
    left_out = _left_out(pairs)
    columns = [*chosen, *against]
    cells = [(model, *(f"{own[name]:.4g}" if name in own else "" for name in columns)) for model, own in values.items()]
    blocks: list[Block] = [
        "Correlations over models, with 95 % intervals of a bootstrap over models: they show how far a number depends"
        " on the choice of models. Models of one family are not independent draws, so the true uncertainty is"
        " larger. A lower perplexity should go with a higher score, so the best is -1.",
        table,
        *left_out,
        *(Picture(names[score], f"{score} against each perplexity, one point per model.") for score in against),
        Heading("Values"),
        Table(("model", *columns), cells),
    ]
    numbers = {"pairs": [pair._asdict() for pair in pairs], "values": values, "files": list(files)}
    write_report(folder, "Perplexities and benchmark scores", blocks, pictures, numbers, name="correlation")
    printed = [as_text_table(table, left=range(len(_HEAD))), *left_out, f"Report: {folder / 'report.html'}"]
    return "\n".join(printed) + "\n"


class Pair(NamedTuple):
    """A perplexity and a score.

    Attributes:
        metric: Name of the perplexity.
        score: Name of the score.
        models: Those that have both, in order of the files.
        left_out: Why each of the others does not count.
        undefined: Why the correlation does not exist; empty if it does.
    """

    metric: str
    score: str
    models: list[str]
    left_out: dict[str, str]
    undefined: str = ""
    pearson: float = math.nan
    pearson_interval: Interval | None = None
    spearman: float = math.nan
    spearman_interval: Interval | None = None


def _pair(values: Values, metric: str, score: str) -> Pair:
    problems = {model: [_problem(entry, name) for name in (metric, score)] for model, entry in values.items()}
    left_out = {model: ", ".join(filter(None, found)) for model, found in problems.items() if any(found)}
    kept = [model for model in values if model not in left_out]
    if len(kept) < MIN_MODELS:
        return Pair(metric, score, kept, left_out, f"{len(kept)} models are too few")
    x, y = ([values[model][name] for model in kept] for name in (metric, score))
    for name, numbers in ((metric, x), (score, y)):
        if len(set(numbers)) == 1:
            return Pair(metric, score, kept, left_out, f"{name} is {numbers[0]:g} for all models")
    linear = pearson(x, y), bootstrap_interval(x, y, "pearson")
    return Pair(metric, score, kept, left_out, "", *linear, spearman(x, y), bootstrap_interval(x, y))


def _problem(entry: Mapping[str, float], name: str) -> str:
    """Return why a value cannot be correlated; empty if it can."""
    if name not in entry:
        return f"no {name}"
    if math.isfinite(entry[name]):
        return ""
    if math.isinf(entry[name]):
        return f"{name} is infinite"
    return f"{name} is not a number" + (" (no key token)" if name.startswith("longppl") else "")


def _check_enough(pairs: Sequence[Pair]) -> None:
    best = max(pairs, key=lambda pair: len(pair.models))
    if len(best.models) < MIN_MODELS:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in best.left_out.items())
        raise ValueError(
            f"A correlation needs at least {MIN_MODELS} models that have both values, and {best.metric} and"
            f" {best.score} have {len(best.models)} ({', '.join(best.models) or 'none'}). Not among them:"
            f" {reasons or 'none'}. Give results of more models; NAME=FILE makes names agree."
        )


def _row(pair: Pair) -> tuple[str, ...]:
    results = [
        f"{value:.2f}" + (f" [{interval.low:.2f}, {interval.high:.2f}]" if interval else "")
        for value, interval in ((pair.pearson, pair.pearson_interval), (pair.spearman, pair.spearman_interval))
    ]
    return (pair.score, pair.metric, str(len(pair.models)), *((pair.undefined, "") if pair.undefined else results))


def _left_out(pairs: Sequence[Pair]) -> list[str]:
    """Write a sentence for each model that is left out, with all reasons."""
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for pair in pairs:
        for model, reason in pair.left_out.items():
            reasons[model] |= dict.fromkeys(reason.split(", "))
    return [f"Left out where it lacks a value: {model}: {', '.join(found)}." for model, found in reasons.items()]


def _file_names(scores: Sequence[str]) -> dict[str, str]:
    """Name the figure of each score, without characters that file systems refuse."""
    names: dict[str, str] = {}
    for score in scores:
        name = re.sub(r"[^\w.-]+", "_", score)
        while name in names.values():
            name = f"{name}-{len(names)}"
        names[score] = name
    return names


def _scatter(pairs: Sequence[Pair], values: Values, log_axis: bool) -> str:
    """Plot a score against each perplexity as SVG, with a legend: names beside the points would cover each other."""
    models = list(dict.fromkeys(model for pair in pairs for model in pair.models))
    # Color and marker change together, so that dozens of models differ.
    markers = {
        model: {"color": f"C{number % _COLORS}", "marker": marker}
        for number, (model, marker) in enumerate(zip(models, cycle(_MARKERS), strict=False))
    }
    with matplotlib.rc_context(_STYLE):
        columns = min(_COLUMNS, len(pairs))
        rows = -(-len(pairs) // columns)
        figure = Figure(figsize=(4.6 * columns + 1.5, 3.8 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[str, Any] = {}
        for axis, pair in zip(axes, pairs, strict=False):
            for model in pair.models:
                x, y = values[model][pair.metric], values[model][pair.score]
                (handles[model],) = axis.plot(x, y, linestyle="", markersize=5, **markers[model])
            _label_axis(axis, pair, log_axis)
        for axis in axes[len(pairs) :]:
            axis.set_axis_off()
        figure.legend([handles[model] for model in models], models, loc="outside right upper", fontsize=7)
        return as_svg(figure)


def _label_axis(axis: Axes, pair: Pair, log_axis: bool) -> None:
    axis.set(xlabel=pair.metric, ylabel=pair.score)
    axis.margins(0.15)
    if log_axis:
        axis.set(xscale="log", xlabel=f"{pair.metric} (log scale)")
        for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
            formatter(LogFormatter(minor_thresholds=(2, 0.6)))  # 20 and 100 instead of powers of 10
    title = pair.undefined or f"Pearson {pair.pearson:.2f}, Spearman {pair.spearman:.2f}, {len(pair.models)} models"
    axis.set_title(title, fontsize=8)
