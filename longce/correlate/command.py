"""``longce correlate``: correlate perplexities with benchmark scores over models."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from lightning_modules.models.loading.provenance import UNKNOWN, describe_numerics
from lightning_modules.utilities.files import writable_folder, write_json
from lightning_modules.utilities.statistics import (
    MIN_FOR_INTERVAL,
    MIN_MODELS,
    Correlation,
    CorrelationDifference,
    compare_correlations,
    correlate_values,
)
from lightning_modules.visualization.images import COLORS, PANEL, STYLE, as_svg
from lightning_modules.visualization.report import (
    Block,
    Heading,
    Picture,
    Table,
    as_text_table,
    format_estimate,
    write_report,
)
from longce.correlate.joining import Models, choose_names, join
from longce.correlate.result_files import Measured, read_results

_HEAD = ("score", "metric", "models", "Pearson [95%]", "Spearman [95%]")
_DIFFERENCES = ("score", "difference", "models", "Pearson [95%], p", "Spearman [95%], p")
_EXPLAINED = (
    f"Correlations over models with 95% intervals, or with p-values for fewer than {MIN_FOR_INTERVAL} models. Models of"
    " one family are not independent draws, so the true uncertainty is larger. A lower perplexity should go with a"
    " higher score, so the best is -1."
)
_DIFFERENCES_EXPLAINED = (
    "Differences between two metrics over the same models, with Zou's 95% intervals and the p-values of Williams' test."
    " Below 0, the first metric has the stronger (negative) correlation."
)
_MARKERS = "osD^v<>pP*Xh"

Values = Mapping[str, Mapping[str, float]]  # by model and name


class Pair(NamedTuple):
    """Perplexity and score, with the models that have both and the reasons why others are left out."""

    metric: str
    score: str
    models: list[str]
    left_out: dict[str, str]
    undefined: str = ""  # why the correlation is undefined
    pearson: Correlation | None = None
    spearman: Correlation | None = None


class Difference(NamedTuple):
    """Correlation of one metric with a score minus that of another one, over the models that have all three."""

    score: str
    metric: str
    other: str
    models: list[str]
    pearson: CorrelationDifference
    spearman: CorrelationDifference


def correlate(
    files: Sequence[str],
    output: str,
    *,
    metrics: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
) -> str:
    """Correlate LongPPL and perplexity of many models with their benchmark scores; options of ``longce correlate``.

    Returns a table of the correlations with their 95% intervals, a table of their differences between metrics, and why
    models are left out.
    """
    # 1. Read the files, and correlate each pair of a metric and a score.
    entries = read_results(files)
    models = join(entries)
    values = models.values
    metrics = choose_names(metrics, models, "metrics")
    scores = choose_names(scores, models, "scores")
    numerics = _describe_numerics(entries)
    pairs = []
    differences = []
    for score in scores:
        pairs += [_correlate_pair(values, metric, score) for metric in metrics]
        differences += _compare_metrics(values, metrics, score)
    _check_enough(pairs, numerics)
    # 2. Write the report and the numbers.
    folder = writable_folder(Path(output).expanduser(), remedy="Choose another one with `--output`.")
    table = Table(_HEAD, [_format_pair(pair) for pair in pairs])
    compared = Table(_DIFFERENCES, [_format_difference(each) for each in differences])
    found_by = [f"{name}: {models.key_tokens[name]}." for name in metrics if name in models.key_tokens]
    left_out = [*numerics, *_describe_left_out(pairs)]
    blocks: list[Block] = [_EXPLAINED, *found_by, table, *left_out]
    pictures: dict[str, str] = {}
    for pair in pairs:
        if pair.models:
            name = re.sub(r"[^\w.-]+", "_", f"{pair.score}-{pair.metric}")  # without what file systems refuse
            if name in pictures:
                name = f"{name}-{len(pictures)}"
            pictures[name] = _draw_scatter(pair, values)
            blocks.append(Picture(name, f"{pair.score} against {pair.metric} over {len(pair.models)} models."))
    if differences:
        blocks += [Heading("Differences between metrics"), _DIFFERENCES_EXPLAINED, compared]
    blocks += [Heading("Values"), _tabulate_values(models, [*metrics, *scores])]
    write_report(folder, "Perplexities and benchmark scores", blocks, pictures)
    numbers = {"pairs": pairs, "differences": differences, "values": values, "files": list(files)}
    numbers |= {"provenance": models.provenance, "key_tokens": models.key_tokens}
    write_json(folder / "correlation.json", numbers)
    # 3. Print the tables.
    printed = [as_text_table(table, left=range(len(_HEAD))), ""]
    if differences:
        printed += [as_text_table(compared, left=range(len(_DIFFERENCES))), ""]
    return "\n".join([*printed, *found_by, *left_out, f"Report: {folder / 'report.html'}"]) + "\n"


def _describe_numerics(entries: Sequence[Measured]) -> list[str]:
    known = []
    unknown = []
    for entry in entries:
        if entry.numerics == UNKNOWN:
            file = re.sub(r":\d+$", "", entry.place)  # without the line: a table may have many models
            unknown.append((file, UNKNOWN))
        else:
            known.append((entry.model, entry.numerics))
    return describe_numerics(known) + describe_numerics(unknown)


def _correlate_pair(values: Values, metric: str, score: str) -> Pair:
    kept = []
    left_out = {}
    x = []
    y = []
    for model, numbers in values.items():
        problems = [_find_problem(numbers, metric), _find_problem(numbers, score)]
        if any(problems):
            left_out[model] = "; ".join(filter(None, problems))
            continue
        kept.append(model)
        x.append(numbers[metric])
        y.append(numbers[score])
    try:
        return Pair(metric, score, kept, left_out, "", correlate_values(x, y, "pearson"), correlate_values(x, y))
    except ValueError as error:
        return Pair(metric, score, kept, left_out, str(error))


def _compare_metrics(values: Values, metrics: Sequence[str], score: str) -> list[Difference]:
    """Compare the first metric with each other one; without those of undefined correlations."""
    found = []
    metric = metrics[0]
    for other in metrics[1:]:
        kept = []
        x = []
        y = []
        z = []
        for model, numbers in values.items():
            if any(_find_problem(numbers, name) for name in (metric, other, score)):
                continue
            kept.append(model)
            x.append(numbers[metric])
            y.append(numbers[other])
            z.append(numbers[score])
        try:
            pearson = compare_correlations(x, y, z, "pearson")
            spearman = compare_correlations(x, y, z)
        except ValueError:  # too few models, or a reason that the table of correlations has
            continue
        found.append(Difference(score, metric, other, kept, pearson, spearman))
    return found


def _find_problem(numbers: Mapping[str, float], name: str) -> str:
    """Return why a value cannot be correlated; empty if it can."""
    if name not in numbers:
        return f"no {name}"
    if math.isnan(numbers[name]):
        return f"{name} is not a number"
    if math.isinf(numbers[name]):
        return f"{name} is infinite"
    return ""


def _check_enough(pairs: Sequence[Pair], numerics: Sequence[str]) -> None:
    best = max(pairs, key=lambda pair: len(pair.models))
    if len(best.models) < MIN_MODELS:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in best.left_out.items())
        raise ValueError(
            f"A correlation needs at least {MIN_MODELS} models with both values, but {best.metric} and {best.score}"
            f" have {len(best.models)}. Left out: {reasons or 'none'}. Add results of more models; NAME=FILE renames a"
            f" model. {' '.join(numerics)}".rstrip()
        )


def _format_pair(pair: Pair) -> tuple[str, ...]:
    cells = (pair.undefined, "")
    if pair.pearson is not None and pair.spearman is not None:
        cells = (_format_correlation(pair.pearson), _format_correlation(pair.spearman))
    return (pair.score, pair.metric, str(len(pair.models)), *cells)


def _format_correlation(found: Correlation) -> str:
    if found.interval is None:  # few models
        return f"{found.value:.2f} (p = {found.p:.2f})"
    return format_estimate(found.value, found.interval, ".2f", ".2f")


def _format_difference(difference: Difference) -> tuple[str, ...]:
    cells = []
    for found in (difference.pearson, difference.spearman):
        estimate = format_estimate(found.value, found.interval, "+.2f", "+.2f")
        cells.append(f"{estimate}, {found.p:.2g}")
    models = str(len(difference.models))
    return (difference.score, f"{difference.metric} - {difference.other}", models, *cells)


def _describe_left_out(pairs: Sequence[Pair]) -> list[str]:
    reasons: dict[str, dict[str, None]] = {}
    for pair in pairs:
        for model, reason in pair.left_out.items():
            reasons.setdefault(model, {}).update(dict.fromkeys(reason.split("; ")))
    return [f"Left out where it lacks a value: {model}: {'; '.join(found)}." for model, found in reasons.items()]


def _tabulate_values(models: Models, names: Sequence[str]) -> Table:
    rows = []
    for model, numbers in models.values.items():
        cells = [f"{numbers[name]:.4g}" if name in numbers else "" for name in names]
        rows.append((model, *cells, models.provenance.get(model, "")))
    return Table(("model", *names, "weights, dtype, attention"), rows)


@matplotlib.rc_context(STYLE)
def _draw_scatter(pair: Pair, values: Values) -> str:
    """Plot a score against a perplexity as SVG, with a legend because names next to points would overlap."""
    width, height = PANEL
    figure = Figure(figsize=(width, height + 0.09 * len(pair.models)), layout="constrained")
    axis = figure.subplots()
    # Cycle colors and markers together, so that dozens of models look different; a model looks the same in each figure.
    for model, color, marker in zip(values, cycle(COLORS), cycle(_MARKERS), strict=False):
        if model in pair.models:
            x = values[model][pair.metric]
            y = values[model][pair.score]
            axis.scatter(x, y, s=25, color=color, marker=marker, label=model)
    axis.set(xlabel=pair.metric, ylabel=pair.score)
    axis.margins(0.15)
    figure.legend(loc="outside lower left", ncols=2, fontsize=7)
    return as_svg(figure)
