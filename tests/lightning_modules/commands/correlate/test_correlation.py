import math

import numpy as np
import pytest

from lightning_modules.commands.correlate.correlation import bootstrap_interval, pearson, spearman


def slow_pearson(x, y):
    mx, my = math.fsum(x) / len(x), math.fsum(y) / len(y)
    products = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return products / math.sqrt(math.fsum((a - mx) ** 2 for a in x) * math.fsum((b - my) ** 2 for b in y))


def slow_ranks(x):
    """Ranks from 1; equal values share the mean of theirs."""
    return [sum(b < a for b in x) + (1 + sum(b == a for b in x)) / 2 for a in x]


@pytest.fixture(params=[3, 9, 40])
def models(request):
    rng = np.random.default_rng(request.param)
    x = rng.normal(size=request.param)
    return x.tolist(), (rng.integers(-2, 3, size=request.param) - 0.7 * x).round(1).tolist()


def test_as_one_sum_after_the_other(models):
    x, y = models
    assert pearson(x, y) == pytest.approx(slow_pearson(x, y), abs=1e-12)
    assert spearman(x, y) == pytest.approx(slow_pearson(slow_ranks(x), slow_ranks(y)), abs=1e-12)


def test_the_interval_is_that_of_resamples_one_by_one():
    x, y = [1.0, 2.0, 3.0, 5.0, 4.5], [2.0, 1.0, 4.0, 3.0, 3.0]
    values = []
    for drawn in np.random.default_rng(0).integers(5, size=(10_000, 5)):
        a, b = [x[i] for i in drawn], [y[i] for i in drawn]
        if len(set(a)) > 1 and len(set(b)) > 1:  # equal values have no correlation
            values.append(slow_pearson(slow_ranks(a), slow_ranks(b)))
    assert bootstrap_interval(x, y) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert len(values) < 10_000


def test_the_interval_narrows_with_more_models_and_is_the_same_again():
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    y = x + rng.normal(size=200)
    few, many = bootstrap_interval(x[:10], y[:10], "pearson"), bootstrap_interval(x, y, "pearson")
    assert many[1] - many[0] < 0.5 * (few[1] - few[0])
    assert many[0] < pearson(x, y) < many[1]
    assert bootstrap_interval(x, y, "pearson") == many


@pytest.mark.parametrize("function", [pearson, spearman, bootstrap_interval])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2], [1, 2]),
        ([1, math.nan, 3], [1, 2, 3]),
        ([1, 2, 3], [1, 2, math.inf]),
        ([1, 2, 3], [0.1, 0.1, 0.1]),
    ],
)
def test_what_has_no_correlation_is_refused(function, x, y):
    with pytest.raises(ValueError):  # noqa: PT011
        function(x, y)
