"""Correlations of perplexities and scores over models, with what they leave out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_modules.commands.correlate.correlation import Interval, bootstrap_interval, pearson, spearman
from lightning_modules.commands.correlate.models import Models

FEWEST = 3
"""Models that a correlation needs."""


class Pair(NamedTuple):
    """A perplexity and a score.

    Attributes:
        metric: Name of the perplexity.
        score: Name of the score.
        models: Those that have both, in order of the files.
        left_out: Why each of the others does not count.
        pearson: NaN if there is none.
        pearson_interval: Of the bootstrap over models, 95 %; None if there is none.
        spearman: Likewise.
        spearman_interval: Likewise.
        undefined: Why there is no correlation; empty if there is one.
    """

    metric: str
    score: str
    models: list[str]
    left_out: dict[str, str]
    pearson: float
    pearson_interval: Interval | None
    spearman: float
    spearman_interval: Interval | None
    undefined: str

    def as_json(self) -> dict[str, Any]:
        """Plain values; intervals as two numbers."""
        intervals = {
            name: None if (one := getattr(self, name)) is None else [one.low, one.high]
            for name in ("pearson_interval", "spearman_interval")
        }
        return {**self._asdict(), **intervals}


def correlations(models: Models, metrics: Sequence[str], scores: Sequence[str]) -> list[Pair]:
    """Each perplexity with each score.

    Raises:
        ValueError: If no pair has at least three models.
    """
    pairs = [_pair(models.values, metric, score) for score in scores for metric in metrics]
    if all(len(pair.models) < FEWEST for pair in pairs):
        best = max(pairs, key=lambda pair: len(pair.models))
        reasons = "; ".join(f"{model}: {reason}" for model, reason in best.left_out.items())
        raise ValueError(
            f"A correlation needs at least {FEWEST} models that have both values, and {best.metric} and {best.score}"
            f" have {len(best.models)} ({', '.join(best.models) or 'none'}). Not among them: {reasons or 'none'}. Give"
            " results of more models; NAME=FILE makes names agree."
        )
    return pairs


def _pair(values: Mapping[str, Mapping[str, float]], metric: str, score: str) -> Pair:
    left_out = {
        model: reason
        for model, entry in values.items()
        if (reason := ", ".join(filter(None, (_missing(entry, metric), _missing(entry, score)))))
    }
    kept = [model for model in values if model not in left_out]
    nothing = (math.nan, None, math.nan, None)
    if len(kept) < FEWEST:
        return Pair(metric, score, kept, left_out, *nothing, f"{len(kept)} models are too few")
    x, y = ([values[model][name] for model in kept] for name in (metric, score))
    for name, numbers in ((metric, x), (score, y)):
        if len(set(numbers)) == 1:
            return Pair(metric, score, kept, left_out, *nothing, f"{name} is {numbers[0]:g} for all models")
    found = (
        *(pearson(x, y), bootstrap_interval(x, y, "pearson")),
        *(spearman(x, y), bootstrap_interval(x, y, "spearman")),
    )
    return Pair(metric, score, kept, left_out, *found, "")


def _missing(entry: Mapping[str, float], name: str) -> str:
    if name not in entry:
        return f"no {name}"
    if math.isfinite(entry[name]):
        return ""
    why = " (no key token)" if name.startswith("longppl") and math.isnan(entry[name]) else ""
    return f"{name} is {'infinite' if math.isinf(entry[name]) else 'not a number'}{why}"
