"""Correlate a metric with a benchmark over models, with bootstrap intervals."""

import warnings
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

MIN_MODELS = 3
_CONFIDENCE, _DRAWS, _SEED = 0.95, 10_000, 0

Interval = tuple[float, float]  # lower and upper percentile


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Compute Pearson's correlation of ``[N]`` values, one per model, in float64; an error if it is undefined.

    Example:
        >>> round(pearson([1, 2, 3], [3, 2, 2]), 3)
        -0.866
    """
    return float(stats.pearsonr(*_check_values(x, y)).statistic)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Compute Spearman's rank correlation, as `pearson`; equal values share their mean rank."""
    return float(stats.spearmanr(*_check_values(x, y)).statistic)


def bootstrap_interval(x: ArrayLike, y: ArrayLike, kind: Literal["pearson", "spearman"] = "spearman") -> Interval:
    """Compute the 95 % percentile interval of a correlation over 10,000 resamples of the models.

    Models of one family are not independent draws, so the true uncertainty is larger.
    """
    x, y = _check_values(x, y)
    drawn = np.random.default_rng(_SEED).integers(len(x), size=(_DRAWS, len(x)))
    xs, ys = x[drawn], y[drawn]
    if kind == "spearman":
        xs, ys = stats.rankdata(xs, axis=1), stats.rankdata(ys, axis=1)
    with warnings.catch_warnings():  # resamples of equal values have no correlation and do not count
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        values = stats.pearsonr(xs, ys, axis=1).statistic
    low, high = np.nanquantile(values, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2]).tolist()
    return low, high


def _check_values(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) < MIN_MODELS:
        raise ValueError(f"{len(x)} models are too few")
    for values in (x, y):
        if not np.isfinite(values).all():
            raise ValueError(f"not all values are finite: {values.tolist()}")
        if np.ptp(values) == 0:
            raise ValueError(f"all models have the value {values[0]:g}")
    return x, y
