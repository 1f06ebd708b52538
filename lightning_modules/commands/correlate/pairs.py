"""Correlate perplexities with scores over models, and report which models are left out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_modules.commands.correlate.correlation import MIN_MODELS, Interval, bootstrap_interval, pearson, spearman


class Pair(NamedTuple):
    """A perplexity and a score.

    Attributes:
        metric: Name of the perplexity.
        score: Name of the score.
        models: Those that have both, in order of the files.
        left_out: Why each of the others does not count.
        undefined: Why the correlation does not exist; empty if it does.
        pearson: NaN if undefined.
        pearson_interval: 95 % bootstrap interval over models.
        spearman: NaN if undefined.
        spearman_interval: 95 % bootstrap interval over models.
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


def correlations(
    values: Mapping[str, Mapping[str, float]], metrics: Sequence[str], scores: Sequence[str]
) -> list[Pair]:
    """Correlate each perplexity with each score.

    Raises:
        ValueError: If no pair has at least three models.
    """
    pairs = [_pair(values, metric, score) for score in scores for metric in metrics]
    best = max(pairs, key=lambda pair: len(pair.models))
    if len(best.models) < MIN_MODELS:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in best.left_out.items())
        raise ValueError(
            f"A correlation needs at least {MIN_MODELS} models that have both values, and {best.metric} and"
            f" {best.score} have {len(best.models)} ({', '.join(best.models) or 'none'}). Not among them:"
            f" {reasons or 'none'}. Give results of more models; NAME=FILE makes names agree."
        )
    return pairs


def _pair(values: Mapping[str, Mapping[str, float]], metric: str, score: str) -> Pair:
    problems = {model: [_problem(entry, name) for name in (metric, score)] for model, entry in values.items()}
    left_out = {model: ", ".join(filter(None, found)) for model, found in problems.items() if any(found)}
    kept = [model for model in values if model not in left_out]
    if len(kept) < MIN_MODELS:
        return Pair(metric, score, kept, left_out, f"{len(kept)} models are too few")
    x, y = ([values[model][name] for model in kept] for name in (metric, score))
    for name, numbers in ((metric, x), (score, y)):
        if len(set(numbers)) == 1:
            return Pair(metric, score, kept, left_out, f"{name} is {numbers[0]:g} for all models")
    found: dict[str, Any] = {
        "pearson": pearson(x, y),
        "pearson_interval": bootstrap_interval(x, y, "pearson"),
        "spearman": spearman(x, y),
        "spearman_interval": bootstrap_interval(x, y, "spearman"),
    }
    return Pair(metric, score, kept, left_out, **found)


def _problem(entry: Mapping[str, float], name: str) -> str:
    """Return why a value cannot be correlated; empty if it can."""
    if name not in entry:
        return f"no {name}"
    if math.isfinite(entry[name]):
        return ""
    if math.isinf(entry[name]):
        return f"{name} is infinite"
    return f"{name} is not a number" + (" (no key token)" if name.startswith("longppl") else "")
