"""Intervals and tests: correlations over models, mean scores over questions, and means over documents."""

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

MIN_MODELS = 3
MIN_FOR_INTERVAL = 5
"""Minimum number of models or documents for an interval; a correlation of fewer models has a p-value instead."""

TOKENS = {"longppl": "key_tokens", "perplexity": "tokens"}
"""Counts of the tokens that the perplexities of a document average over."""

UNITS = TOKENS | {
    "longppl_soft": "soft_weight",
    "longppl_per_evaluator_token": "evaluator_key_tokens",
    "key_bits_per_byte": "key_bytes",
    "bits_per_byte": "bytes",
}
"""Units that the numbers of a document are per: tokens, weights or bytes. All but bits are exponentials of a mean."""

RUNS = "runs"
"""Column with the number of runs, in a table of documents whose numbers are means over the runs of a group."""

_CONFIDENCE = 0.95
_SEED = 0
_Z = float(stats.norm.ppf((1 + _CONFIDENCE) / 2))

Interval = tuple[float, float]
Kind = Literal["pearson", "spearman"]


class Correlation(NamedTuple):
    """Correlation over models with its 95% interval, or for fewer than 5 models with a p-value instead.

    ``p`` is the probability of a correlation at least as strong, of either sign, if the values are assigned to the
    models at random.
    """

    value: float
    models: int
    interval: Interval | None = None
    p: float | None = None


class CorrelationDifference(NamedTuple):
    """Difference of two correlations over the same models, its 95% interval, and the p-value of Williams' test."""

    value: float
    interval: Interval
    p: float


def correlate_values(x: ArrayLike, y: ArrayLike, kind: Kind = "spearman") -> Correlation:
    """Correlate ``[N]`` values, one per model, in float64; a ValueError if the correlation is undefined.

    Pearson's interval is Fisher's, for normally distributed values. Spearman's needs no such assumption about the
    values, only about their ranks (a Gaussian copula), and holds the true correlations that a test does not reject.
    Models of one family are not independent draws, so the true uncertainty is larger.

    Example:
        >>> round(correlate_values([1, 2, 3], [3, 2, 2], "pearson").value, 3)
        -0.866
    """
    first, second = _check_values(x, y)
    if kind == "spearman":  # equal values share their mean rank
        first = stats.rankdata(first)
        second = stats.rankdata(second)
    found = stats.pearsonr(first, second)
    models = len(first)
    value = float(found.statistic)
    if models < MIN_FOR_INTERVAL:
        # Not that of `pearsonr`, which doubles the smaller tail: without ties it would be up to twice as large.
        exact = stats.permutation_test(
            (second,),
            lambda order: abs(stats.pearsonr(first, order).statistic),
            permutation_type="pairings",
            alternative="greater",
            vectorized=False,
        )
        return Correlation(value, models, p=float(exact.pvalue))
    if kind == "spearman":
        return Correlation(value, models, _spearman_interval(round(value, 9), models))
    low, high = found.confidence_interval(_CONFIDENCE)
    return Correlation(value, models, (float(low), float(high)))


def compare_correlations(
    first: ArrayLike, second: ArrayLike, score: ArrayLike, kind: Kind = "spearman"
) -> CorrelationDifference:
    """Compare the correlations of two metrics with the same score over the same models, each ``[N]``.

    The interval is that of Zou (2007, https://doi.org/10.1037/1082-989X.12.4.399), from the intervals of the two
    correlations and the correlation between them. Williams' test is the one that Steiger (1980,
    https://doi.org/10.1037/0033-2909.87.2.245) recommends. A ValueError for fewer than 5 models.
    """
    _check_values(first, score, MIN_FOR_INTERVAL)
    one = correlate_values(first, score, kind)
    other = correlate_values(second, score, kind)
    assert one.interval is not None
    assert other.interval is not None
    a = one.value
    b = other.value
    c = correlate_values(first, second, kind).value
    models = one.models
    # 1. Zou's interval. The two estimates are correlated, which is undefined next to a perfect correlation.
    rest = 1 - a * a - b * b - c * c
    shared = ((c - a * b / 2) * rest + c**3) / ((1 - a * a) * (1 - b * b)) if max(abs(a), abs(b)) < 1 else 0.0
    interval = difference_interval((a, one.interval), (b, other.interval), shared)
    # 2. Williams' test.
    determinant = max(rest + 2 * a * b * c, 0.0)
    variance = 2 * (models - 1) / (models - 3) * determinant + ((a + b) / 2) ** 2 * (1 - c) ** 3
    t = (a - b) * math.sqrt((models - 1) * (1 + c) / variance) if variance > 0 else 0.0
    return CorrelationDifference(a - b, interval, float(2 * stats.t.sf(abs(t), models - 3)))


def score_interval(scores: ArrayLike, groups: Sequence[Hashable] | None = None) -> Interval | None:
    """Return the 95% interval of the mean of ``[N]`` scores from 0 to 1, of questions in ``groups`` that share a text.

    Wilson's interval: for 20 right answers of 20 it is 0.84 to 1. Questions of a group are not independent, so N is
    replaced by an effective number (Korn and Graubard, 1998): the number of independent questions that would have the
    variance between groups, with few groups counting less. None without scores, or if all are of one group.
    """
    values = np.asarray(scores, dtype=np.float64)
    count = len(values)
    mean = float(values.mean()) if len(values) else math.nan
    _, places = np.unique(np.arange(count) if groups is None else np.asarray(groups), return_inverse=True)
    sums = np.bincount(places, weights=values - mean)
    effective = float(count)
    if count == 0 or len(sums) == 1 < count:
        return None
    if len(sums) < count and mean in (0.0, 1.0):
        effective = len(sums)  # nothing shows that questions of a group differ
    elif len(sums) < count:
        variance = len(sums) / (len(sums) - 1) * float(np.square(sums).sum()) / count**2
        effective = min(mean * (1 - mean) / variance, count) if variance > 0 else count
        effective *= (_Z / float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(sums) - 1))) ** 2
    middle = mean + _Z**2 / (2 * effective)
    half = math.sqrt(mean * (1 - mean) / effective + (_Z / effective) ** 2 / 4)
    scale = 1 + _Z**2 / effective
    return max((middle - _Z * half) / scale, 0.0), min((middle + _Z * half) / scale, 1.0)


def in_percent(interval: Interval | None) -> Interval | None:
    """Return an interval of fractions in percent."""
    if interval is None:
        return None
    low, high = interval
    return 100 * low, 100 * high


def mean_interval(
    means: Sequence[float], intervals: Sequence[Interval | None], weights: Sequence[float] | None = None
) -> Interval | None:
    """Return the 95% interval of the weighted average of independent means, from theirs; None if one is unknown.

    The method is that of Zou (2007). By default all means have the same weight.
    """
    known = [interval for interval in intervals if interval is not None]
    if not known or len(known) < len(intervals):
        return None
    shares = np.ones(len(means)) if weights is None else np.asarray(weights, dtype=np.float64)
    shares /= shares.sum()
    ends = np.asarray(known)
    average = float(shares @ means)
    below, above = (float(np.linalg.norm(shares * (ends[:, end] - means))) for end in (0, 1))
    return average - below, average + above


def score_difference(
    first: ArrayLike, second: ArrayLike, groups: Sequence[Hashable] | None = None
) -> tuple[float, Interval | None]:
    """Return the difference of two models' mean scores over the same ``[N]`` questions, with its 95% interval.

    The method is the tenth of Newcombe (1998, Statistics in Medicine 17, 2635) with the intervals of `score_interval`.
    Its correlation has a continuity correction, so equal answers of both models do not mean that they are equal.
    """
    scores = np.asarray([first, second], dtype=np.float64)
    one = score_interval(scores[0], groups)
    other = score_interval(scores[1], groups)
    a, b = map(float, scores.mean(axis=1))
    if one is None or other is None:
        return a - b, None
    _, places = np.unique(np.arange(scores.shape[1]) if groups is None else np.asarray(groups), return_inverse=True)
    sums = np.array([np.bincount(places, weights=values) for values in scores - scores.mean(axis=1, keepdims=True)])
    spread = math.sqrt(float((sums[0] @ sums[0]) * (sums[1] @ sums[1])))
    shared = float(sums[0] @ sums[1])
    correction = (scores.shape[1] / sums.shape[1]) ** 2 / 2
    shared = max(shared - correction, min(shared, 0.0)) / spread if spread > 0 else 0.0
    return a - b, difference_interval((a, one), (b, other), shared)


def weighted_mean_interval(
    values: NDArray[np.float64], weights: NDArray[np.float64], others: Sequence[tuple[float, int]] = ()
) -> Interval | None:
    """Return the 95% interval of a mean over documents, such as of the tokens of ``[N]`` documents of unequal length.

    Student's t with the delete-one jackknife. It counts documents as independent, not tokens. For 5 documents with
    weights that differ by a factor of e, it covers the true mean in 92% of simulations, a bootstrap in 81%. None for
    fewer than 5 documents. ``others`` are further variances of the mean, each with its degrees of freedom, such as
    those between seeds; they are added up, with the degrees of freedom of Welch and Satterthwaite.
    """
    count = len(values)
    if count < MIN_FOR_INTERVAL:
        return None
    total = float(values @ weights)
    weight = float(weights.sum())
    without = (total - values * weights) / (weight - weights)
    parts = [(float(without.var()) * (count - 1), count - 1), *others]
    variance = math.fsum(part for part, _ in parts)
    spread = math.fsum(part**2 / freedom for part, freedom in parts)
    freedom = variance**2 / spread if spread > 0 else count - 1
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom)) * math.sqrt(variance)
    return total / weight - half, total / weight + half


def seed_variance(kind: str) -> str:
    """Return the column with the variance between seeds of a number's mean logarithm over the runs of a group."""
    return f"{kind}_seed_variance"


def _list_seed_variances(shared: pd.DataFrame, kind: str) -> list[tuple[float, int]]:
    """Return the variances of groups of runs, with their degrees of freedom; none for single runs."""
    found = []
    for suffix in ("", "_baseline"):
        runs = int(shared[RUNS + suffix].iloc[0]) if RUNS + suffix in shared else 1
        if runs > 1:
            found.append((float(shared[seed_variance(kind) + suffix].iloc[0]), runs - 1))
    return found


def corpus_mean(documents: pd.DataFrame, kind: str) -> float:
    """Return one of `UNITS`, such as ``longppl``, over all tokens or bytes of the documents; NaN without any."""
    counted = documents[documents[UNITS[kind]] > 0]
    if counted.empty:
        return math.nan
    if kind.endswith("bits_per_byte"):
        return float(np.average(counted[kind], weights=counted[UNITS[kind]]))
    return math.exp(np.average(np.log(counted[kind]), weights=counted[UNITS[kind]]))


def paired_ratio(shared: pd.DataFrame, kind: str) -> tuple[float, Interval | None]:
    """Return the ratio of one of `UNITS` over all tokens or bytes to the baseline's, with its 95% interval.

    The interval covers the choice of documents, and for groups of runs also their seeds. The difficulty of a document
    for both models cancels. Fewer than 5 documents and infinite ratios have no interval.
    """
    counted = shared[shared[UNITS[kind]] > 0]
    if counted.empty:
        return math.nan, None
    tokens = counted[UNITS[kind]].to_numpy()
    seeds = _list_seed_variances(counted, kind)
    if kind.endswith("bits_per_byte"):
        # A quotient of sums is the mean of the quotients, weighted by their denominators.
        bits = counted[f"{kind}_baseline"].to_numpy() * tokens
        quotients = (counted[kind] / counted[f"{kind}_baseline"]).to_numpy()
        value = float(np.average(quotients, weights=bits))
        return value, weighted_mean_interval(quotients, bits, [(value**2 * part, each) for part, each in seeds])
    differences = (np.log(counted[kind]) - np.log(counted[f"{kind}_baseline"])).to_numpy()
    value = math.exp(np.average(differences, weights=tokens))
    # A model that has diverged has infinite perplexities.
    interval = weighted_mean_interval(differences, tokens, seeds) if 0 < value < math.inf else None
    with np.errstate(over="ignore"):
        return value, interval and (float(np.exp(interval[0])), float(np.exp(interval[1])))


def questions_needed(interval: Interval, questions: int, half_width: float) -> int:
    """Return about how many questions make an interval of ``questions`` as narrow as ``half_width`` to each side."""
    return math.ceil(questions * ((interval[1] - interval[0]) / 2 / half_width) ** 2)


def difference_interval(first: tuple[float, Interval], second: tuple[float, Interval], correlation: float) -> Interval:
    """Return the interval of a difference of two correlated estimates, from their values and intervals (Zou, 2007)."""
    (a, (a_low, a_high)) = first
    (b, (b_low, b_high)) = second
    below = (a - a_low) ** 2 + (b_high - b) ** 2 - 2 * correlation * (a - a_low) * (b_high - b)
    above = (a_high - a) ** 2 + (b - b_low) ** 2 - 2 * correlation * (a_high - a) * (b - b_low)
    return a - b - math.sqrt(max(below, 0.0)), a - b + math.sqrt(max(above, 0.0))


@lru_cache(maxsize=1024)
def _spearman_interval(value: float, models: int) -> Interval:
    """Return the correlations of ranks that a test by simulation does not reject, with its mid-p-value.

    A closed form fails where it is needed: at a true correlation of -0.96 of 9 models, that of Bonett and Wright (2000)
    covers it in 91% of samples, at -0.99 in 69%.
    """
    draws = max(2_000, 100_000 // models)
    first, noise = np.random.default_rng(_SEED).standard_normal((2, draws, models))
    ranks = stats.zscore(stats.rankdata(first, axis=1), axis=1)

    def larger(slope: float) -> float:
        """Return the fraction of samples with a larger correlation, where that of the normal values is tanh(slope)."""
        rho = math.tanh(slope)
        others = stats.rankdata(rho * first + math.sqrt(1 - rho * rho) * noise, axis=1)
        drawn = (ranks * stats.zscore(others, axis=1)).mean(axis=1)
        return float(np.mean(drawn > value + 1e-9) + np.mean(np.abs(drawn - value) <= 1e-9) / 2)

    def limit(target: float) -> float:
        if larger(-5) > target or larger(5) < target:
            return math.copysign(1.0, value)
        slope = optimize.brentq(lambda slope: larger(slope) - target, -5, 5, xtol=0.005)
        return 6 / math.pi * math.asin(math.tanh(slope) / 2)

    return limit((1 - _CONFIDENCE) / 2), limit((1 + _CONFIDENCE) / 2)


def _check_values(
    x: ArrayLike, y: ArrayLike, least: int = MIN_MODELS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x = np.asarray(x, dtype=np.float64)
    y = np.asarray(y, dtype=np.float64)
    if len(x) < least:
        raise ValueError(f"{len(x)} models are too few, {least} are needed")
    for values in (x, y):
        if not np.isfinite(values).all():
            raise ValueError(f"{int((~np.isfinite(values)).sum())} of {len(values)} values are not finite")
        if np.ptp(values) == 0:
            raise ValueError(f"all models have the value {values[0]:g}")
    return x, y
