"""``longce correlate``: correlate perplexities with benchmark scores over models."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

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
from lightning_modules.visualization.report import Block, Heading, Picture, Table, as_text_table, write_report
from longce.correlate.joining import Models, choose_names, describe_numerics, join
from longce.correlate.result_files import read_results

_HEAD = ("score", "metric", "models", "Pearson [95%]", "Spearman [95%]")
_DIFFERENCES = ("score", "difference", "models", "Pearson [95%], p", "Spearman [95%], p")
_EXPLAINED = (
    "Differences between two metrics over the same models, with Zou's 95% intervals and the p-values of Williams' test."
    " Below 0, the first metric has the stronger (negative) correlation."
)
_MARKERS = "osD^v<>pP*Xh"

Values = Mapping[str, Mapping[str, float]]  # by model and name


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
    entries = read_results(files)
    models = join(entries)
    numerics = describe_numerics(entries)
    values = models.values
    chosen = choose_names(metrics, models, "metrics")
    against = choose_names(scores, models, "scores")
    pairs = [_correlate_pair(values, metric, score) for score in against for metric in chosen]
    _check_enough(pairs, numerics)
    folder = writable_folder(Path(output).expanduser(), remedy="Choose another one with `--output`.")
    figures = _file_names([pair for pair in pairs if pair.models])
    pictures = {name: _draw_scatter(pair, values) for name, pair in figures.items()}
    table = Table(_HEAD, [_format_pair(pair) for pair in pairs])
    differences = [_compare_metrics(values, score, chosen[0], other) for score in against for other in chosen[1:]]
    compared = Table(_DIFFERENCES, [_format_difference(each) for each in differences if each.spearman is not None])
    left_out = [*numerics, *_describe_left_out(pairs), *_describe_repeated(models)]
    columns = [*chosen, *against]
    cells = [
        (model, *(f"{own[name]:.4g}" if name in own else "" for name in columns), models.provenance.get(model, ""))
        for model, own in values.items()
    ]
    found_by = [f"{name}: {models.key_tokens[name]}." for name in chosen if name in models.key_tokens]
    blocks: list[Block] = [
        f"Correlations over models with 95% intervals, or with p-values for fewer than {MIN_FOR_INTERVAL} models."
        " Models of one family are not independent draws, so the true uncertainty is larger. A lower perplexity should"
        " go with a higher score, so the best is -1.",
        *found_by,
        table,
        *left_out,
        *(Picture(name, _describe_figure(pair)) for name, pair in figures.items()),
        *([Heading("Differences between metrics"), _EXPLAINED, compared] if compared.rows else ()),
        Heading("Values"),
        Table(("model", *columns, "weights, dtype, attention"), cells),
    ]
    numbers = {"pairs": pairs, "differences": differences, "values": values, "files": list(files)}
    numbers |= {"provenance": models.provenance, "key_tokens": models.key_tokens}
    write_report(folder, "Perplexities and benchmark scores", blocks, pictures)
    write_json(folder / "correlation.json", numbers)
    printed = [as_text_table(each, left=range(len(_HEAD))) + "\n" for each in (table, compared) if each.rows]
    printed += [*found_by, *left_out, f"Report: {folder / 'report.html'}"]
    return "\n".join(printed) + "\n"


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
    pearson: CorrelationDifference | None = None  # if there are too few models
    spearman: CorrelationDifference | None = None


def _correlate_pair(values: Values, metric: str, score: str) -> Pair:
    problems = {model: [_find_problem(entry, name) for name in (metric, score)] for model, entry in values.items()}
    left_out = {model: "; ".join(filter(None, found)) for model, found in problems.items() if any(found)}
    kept = [model for model in values if model not in left_out]
    x, y = ([values[model][name] for model in kept] for name in (metric, score))
    try:
        return Pair(metric, score, kept, left_out, "", correlate_values(x, y, "pearson"), correlate_values(x, y))
    except ValueError as error:
        return Pair(metric, score, kept, left_out, str(error))


def _compare_metrics(values: Values, score: str, metric: str, other: str) -> Difference:
    names = (metric, other, score)
    kept = [model for model, entry in values.items() if not any(_find_problem(entry, name) for name in names)]
    x, y, z = ([values[model][name] for model in kept] for name in names)
    try:
        pearson = compare_correlations(x, y, z, "pearson")
        spearman = compare_correlations(x, y, z)
    except ValueError:  # the first table has the reason
        return Difference(score, metric, other, kept)
    return Difference(score, metric, other, kept, pearson, spearman)


def _find_problem(entry: Mapping[str, float], name: str) -> str:
    """Return why a value cannot be correlated; empty if it can."""
    if name not in entry:
        return f"no {name}"
    if math.isfinite(entry[name]):
        return ""
    return f"{name} is {'not a number' if math.isnan(entry[name]) else 'infinite'}"


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
    found = pair.pearson, pair.spearman
    cells = [pair.undefined, ""] if pair.undefined else [_format_correlation(each) for each in found if each]
    return (pair.score, pair.metric, str(len(pair.models)), *cells)


def _format_correlation(found: Correlation) -> str:
    if found.interval is None:  # few models
        return f"{found.value:.2f} (p = {found.p:.2f})"
    return "{:.2f} [{:.2f}, {:.2f}]".format(found.value, *found.interval)


def _format_difference(difference: Difference) -> tuple[str, ...]:
    found = difference.pearson, difference.spearman
    cells = ["{:+.2f} [{:+.2f}, {:+.2f}], {:.2g}".format(each.value, *each.interval, each.p) for each in found if each]
    models = str(len(difference.models))
    return (difference.score, f"{difference.metric} - {difference.other}", models, *cells)


def _describe_left_out(pairs: Sequence[Pair]) -> list[str]:
    reasons: dict[str, dict[str, None]] = {}
    for pair in pairs:
        for model, reason in pair.left_out.items():
            reasons.setdefault(model, {}).update(dict.fromkeys(reason.split("; ")))
    return [f"Left out where it lacks a value: {model}: {'; '.join(found)}." for model, found in reasons.items()]


def _describe_repeated(models: Models) -> list[str]:
    """Return which names are of one model, which would then count more than once."""
    names: dict[str, list[str]] = defaultdict(list)
    for model, content in models.provenance.items():
        names[content].append(model)
    return [f"The same model counts {len(same)} times: {', '.join(same)}." for same in names.values() if len(same) > 1]


def _file_names(pairs: Sequence[Pair]) -> dict[str, Pair]:
    """Name the figure of each pair, without characters that file systems refuse."""
    names = [re.sub(r"[^\w.-]+", "_", f"{pair.score}-{pair.metric}") for pair in pairs]
    unique = [name if names.index(name) == place else f"{name}-{place}" for place, name in enumerate(names)]
    return dict(zip(unique, pairs, strict=True))


def _draw_scatter(pair: Pair, values: Values) -> str:
    """Plot a score against a perplexity as SVG, with a legend because names next to points would overlap."""
    # Cycle colors and markers together, so that dozens of models look different; a model looks the same in each figure.
    looks = dict(zip(values, zip(cycle(COLORS), cycle(_MARKERS), strict=False), strict=False))
    width, height = PANEL
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height + 0.09 * len(pair.models)), layout="constrained")
        axis = figure.subplots()
        for model in pair.models:
            color, marker = looks[model]
            own = values[model]
            axis.scatter(own[pair.metric], own[pair.score], s=25, color=color, marker=marker, label=model)
        axis.set(xlabel=pair.metric, ylabel=pair.score)
        axis.margins(0.15)
        figure.legend(loc="outside lower left", ncols=2, fontsize=7)
        return as_svg(figure)


def _describe_figure(pair: Pair) -> str:
    names = {"Pearson": pair.pearson, "Spearman": pair.spearman}
    found = pair.undefined or ", ".join(f"{name} {found.value:.2f}" for name, found in names.items() if found)
    return f"{pair.score} against {pair.metric} over {len(pair.models)} models: {found}."
