"""Correlation of a metric with a benchmark over models, and how sure one can be of it with so few."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

Kind = Literal["pearson", "spearman"]


class Interval(NamedTuple):
    """A percentile interval.

    Attributes:
        low: Lower end.
        high: Upper end.
        draws: Resamples it comes from; those in which all models are equal have no correlation and do not count.
    """

    low: float
    high: float
    draws: int


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's correlation coefficient.

    Args:
        x: ``[N]`` values, one per model.
        y: ``[N]`` values of the same models.

    Returns:
        A number in [-1, 1], computed in float64.

    Raises:
        ValueError: If shapes disagree, there are fewer than 3 models, a value is NaN or infinite, or all are equal.

    Example:
        >>> round(pearson([1, 2, 3], [3, 2, 2]), 3)
        -0.866
    """
    x, y = _checked(x, y)
    return float(_rows_pearson(x[None], y[None])[0])


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, equal values sharing the mean of theirs.

    Args:
        x: ``[N]`` values, one per model.
        y: ``[N]`` values of the same models.

    Returns:
        A number in [-1, 1].

    Raises:
        ValueError: As `pearson`.

    Example:
        >>> round(spearman([1, 2, 9], [3, 2, 2]), 3)
        -0.866
    """
    x, y = _checked(x, y)
    return float(_rows_pearson(rankdata(x)[None], rankdata(y)[None])[0])


def bootstrap_interval(
    x: ArrayLike,
    y: ArrayLike,
    kind: Kind = "spearman",
    *,
    confidence: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of a correlation over models drawn with replacement.

    It says how far the result hangs on which models were looked at. Models of one family are no independent draws, so
    the true uncertainty is larger.

    Args:
        x: ``[N]`` values, one per model.
        y: ``[N]`` values of the same models.
        kind: Which correlation.
        confidence: Share of the draws within the interval.
        draws: How many resamples.
        seed: Of the draws.

    Returns:
        The interval and the resamples that count.

    Raises:
        ValueError: As `pearson`, or if ``confidence`` is not in (0, 1) or ``draws`` below 1.
    """
    x, y = _checked(x, y)
    if not 0 < confidence < 1 or draws < 1:
        raise ValueError(
            f"`confidence` must be in (0, 1) and `draws` at least 1, got {confidence} and {draws}: try 0.95 and 10000."
        )
    drawn = np.random.default_rng(seed).integers(len(x), size=(draws, len(x)))
    xs, ys = x[drawn], y[drawn]
    if kind == "spearman":
        xs, ys = rankdata(xs, axis=1), rankdata(ys, axis=1)
    values = _rows_pearson(xs, ys)
    values = values[np.isfinite(values)]
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), len(values))


def _rows_pearson(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[R]`` correlations of the rows of ``[R, N]`` arrays; NaN for a row whose values are all equal."""
    # A mean of equal numbers may differ from them by rounding, and the ratio of roundings looks like a correlation.
    constant = (np.ptp(x, axis=1) == 0) | (np.ptp(y, axis=1) == 0)
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    x, y = (
        x / np.abs(x).max(axis=1, keepdims=True, initial=1e-300),
        y / np.abs(y).max(axis=1, keepdims=True, initial=1e-300),
    )
    scale = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    ratio = (x * y).sum(axis=1) / np.where(constant, 1.0, scale)
    return np.where(constant, np.nan, np.clip(ratio, -1.0, 1.0))


def _checked(x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"Both must be [N], one value per model, got {list(x.shape)} and {list(y.shape)}.")
    if len(x) < 3:
        raise ValueError(f"A correlation over {len(x)} models says nothing: give at least 3.")
    for name, values in (("first", x), ("second", y)):
        if not np.isfinite(values).all():
            model = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"The {name} value of model {model} is {values[model]}: leave the model out, and say so.")
        if np.ptp(values) == 0:
            raise ValueError(f"All {name} values are {values[0]}: models that do not differ have no correlation.")
    return x, y
