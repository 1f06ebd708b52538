import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lightning_modules.utilities.statistics import (
    compare_correlations,
    correlate_values,
    mean_interval,
    questions_needed,
    score_difference,
    score_interval,
)


def slow_pearson(x, y):
    mx, my = math.fsum(x) / len(x), math.fsum(y) / len(y)
    products = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return products / math.sqrt(math.fsum((a - mx) ** 2 for a in x) * math.fsum((b - my) ** 2 for b in y))


def slow_ranks(x):
    """Ranks from 1; equal values share the mean of theirs."""
    return [sum(b < a for b in x) + (1 + sum(b == a for b in x)) / 2 for a in x]


def normal_models(rng, models, correlation):
    x = rng.standard_normal(models)
    return x, correlation * x + math.sqrt(1 - correlation**2) * rng.standard_normal(models)


@pytest.mark.parametrize("count", [3, 9, 40])
def test_correlations_equal_sums_over_single_models(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=count)
    y = (rng.integers(-2, 3, size=count) - 0.7 * x).round(1).tolist()
    assert correlate_values(x, y, "pearson").value == pytest.approx(slow_pearson(x, y), abs=1e-12)
    assert correlate_values(x, y).value == pytest.approx(slow_pearson(slow_ranks(x), slow_ranks(y)), abs=1e-12)


def test_four_models_have_a_p_value_over_all_permutations_and_no_interval():
    x, y = [1.0, 2.0, 3.0, 4.0], [9.0, 7.0, 6.0, 1.0]
    found = correlate_values(x, y)
    others = [slow_pearson(slow_ranks(x), slow_ranks(order)) for order in itertools.permutations(y)]
    assert found.interval is None
    assert found.value == -1
    assert found.p == pytest.approx(sum(abs(other) >= 1 - 1e-9 for other in others) / 24)


def test_the_p_value_counts_correlations_of_either_sign_that_are_as_strong():
    # Of the 6 orders, this one alone has a correlation of 1, and none has -1.
    assert correlate_values([0, 1, 10], [0, 1, 10], "pearson").p == pytest.approx(1 / 6)
    assert correlate_values([0, 1, 10], [0, 1, 10]).p == pytest.approx(2 / 6)


def test_the_interval_of_pearson_is_that_of_fisher():
    x, y = normal_models(np.random.default_rng(0), 9, -0.9)
    r = slow_pearson(x, y)
    low, high = (math.tanh(math.atanh(r) + side * 1.959964 / math.sqrt(6)) for side in (-1, 1))
    assert correlate_values(x, y, "pearson").interval == pytest.approx((low, high), abs=1e-6)


def test_the_interval_of_a_perfect_rank_correlation_is_the_range_that_often_looks_perfect():
    low, high = correlate_values(range(5), range(5)).interval
    assert high == 1
    # At the lower end, ranks agree completely in 5% of all samples, and half of them count.
    rho, rng = 2 * math.sin(math.pi * low / 6), np.random.default_rng(1)
    x = rng.standard_normal((20_000, 5))
    y = rho * x + math.sqrt(1 - rho**2) * rng.standard_normal((20_000, 5))
    assert np.mean((x.argsort(axis=1) == y.argsort(axis=1)).all(axis=1)) == pytest.approx(0.05, abs=0.006)
    assert correlate_values(range(5), range(5, 0, -1)).interval == pytest.approx((-1, -low), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "correlation"),
    [
        (7, 0.0),
        (9, -0.8),
        (12, -0.96),
        *(pytest.param(12, correlation, marks=pytest.mark.long) for correlation in (0.0, -0.8)),
    ],
)
def test_intervals_of_rank_correlations_cover_the_true_one(models, correlation):
    rng, true = np.random.default_rng(3), 6 / math.pi * math.asin(correlation / 2)
    intervals = [correlate_values(*normal_models(rng, models, correlation)).interval for _ in range(300)]
    assert 0.9 < np.mean([low <= true <= high for low, high in intervals]) < 0.995  # standard error: 0.013


def test_two_metrics_are_compared_as_in_the_formulas_of_zou_and_williams():
    rng = np.random.default_rng(4)
    score = rng.standard_normal(9)
    first, second = -score + 0.3 * rng.standard_normal(9), rng.standard_normal(9)
    found = compare_correlations(first, second, score, "pearson")
    one, two = correlate_values(first, score, "pearson"), correlate_values(second, score, "pearson")
    a, b, c = one.value, two.value, correlate_values(first, second, "pearson").value
    assert found.value == pytest.approx(a - b)
    matrix = np.array([[1, a, b], [a, 1, c], [b, c, 1]])
    below = 2 * 8 / 6 * np.linalg.det(matrix) + (a + b) ** 2 / 4 * (1 - c) ** 3
    t = (a - b) * math.sqrt(8 * (1 + c) / below)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 6))
    shared = ((c - a * b / 2) * (1 - a**2 - b**2 - c**2) + c**3) / ((1 - a**2) * (1 - b**2))
    down, up = a - one.interval[0], two.interval[1] - b
    assert found.interval[0] == pytest.approx(a - b - math.sqrt(down**2 + up**2 - 2 * shared * down * up))
    down, up = one.interval[1] - a, b - two.interval[0]
    assert found.interval[1] == pytest.approx(a - b + math.sqrt(down**2 + up**2 - 2 * shared * down * up))


def test_a_perfect_correlation_can_be_compared():
    found = compare_correlations(range(9), [3, 1, 4, 1, 5, 9, 2, 6, 5], range(0, -9, -1))
    assert found.value < -0.3
    assert all(map(math.isfinite, (*found.interval, found.p)))
    same = compare_correlations(range(9), range(9), range(9))
    assert same.value == 0
    assert same.p == 1


def test_four_models_are_too_few_to_compare_two_metrics():
    with pytest.raises(ValueError, match="4 models are too few, 5 are needed"):
        compare_correlations([1, 2, 3, 4], [2, 1, 4, 3], [4, 3, 2, 1])


def test_scores_have_the_interval_of_wilson():
    for right in (0, 7, 20):
        expected = stats.binomtest(right, 20).proportion_ci(method="wilson")
        assert score_interval([1] * right + [0] * (20 - right)) == pytest.approx((expected.low, expected.high))
    assert score_interval([]) is None


def assert_wilson(interval, questions, groups):
    """Check the interval of a score of 0.5 by Wilson's equation."""
    effective = questions * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, groups - 1)) ** 2
    for end in interval:
        assert abs(end - 0.5) == pytest.approx(stats.norm.ppf(0.975) * math.sqrt(end * (1 - end) / effective))


def test_questions_of_one_text_count_less_than_independent_ones():
    scores = [1, 1, 1, 1, 0, 0, 0, 0] * 5
    pairs = [number // 4 for number in range(40)]  # questions of a text are all right, or all wrong
    alone, grouped = score_interval(scores), score_interval(scores, pairs)
    ten = score_interval([1, 0] * 5)
    assert grouped[1] - grouped[0] > 1.5 * (alone[1] - alone[0])
    assert grouped[0] == pytest.approx(ten[0], abs=0.04)
    assert_wilson(
        grouped, 9, 10
    )  # p (1 - p) / (10 / 9 * sum of squares / 40^2), where sums differ by 2 from their mean
    # Questions of a text that differ more than those of two texts do not count as more than they are.
    assert_wilson(score_interval([1, 0] * 10 + [1, 1, 0, 0], [number // 2 for number in range(24)]), 24, 12)
    assert score_interval(scores, [0] * 40) is None
    # All right: nothing shows that questions of a text differ.
    assert score_interval([1] * 40, pairs) == score_interval([1] * 10)


def test_a_difference_of_two_models_is_that_of_newcombe():
    first, second = np.array([1] * 12 + [0] * 8), np.array([1] * 9 + [0] * 9 + [1] * 2)
    (a, b), n = (first.mean(), second.mean()), 20
    ends = [stats.binomtest(int(x.sum()), n).proportion_ci(method="wilson") for x in (first, second)]
    phi = np.corrcoef(first, second)[0, 1] - 0.5 / (n * np.std(first) * np.std(second))  # with the correction
    value, interval = score_difference(first, second)
    assert value == pytest.approx(a - b)
    down, up = a - ends[0].low, ends[1].high - b
    assert interval[0] == pytest.approx(a - b - math.sqrt(down**2 + up**2 - 2 * phi * down * up))
    # Models that are always right are not known to be equal, and the questions of a text count once.
    assert score_difference([1] * 20, [1] * 20)[1] == pytest.approx((-0.1611, 0.1611), abs=1e-3)
    alone = score_difference(np.repeat(first, 5), np.repeat(second, 5))[1]
    grouped = score_difference(np.repeat(first, 5), np.repeat(second, 5), np.repeat(np.arange(n), 5).tolist())[1]
    assert grouped == pytest.approx(interval, abs=0.03)
    assert grouped[1] - grouped[0] > 1.8 * (alone[1] - alone[0])
    assert score_difference([1, 0], [0, 0], ["text", "text"]) == (0.5, None)


def test_intervals_of_differences_cover_the_true_one():
    rng, texts, hits = np.random.default_rng(7), np.repeat(np.arange(25), 4), []
    for _ in range(300):
        hard = rng.beta(2, 1, size=25)[texts]  # for both models
        first, second = rng.random(100) < hard, rng.random(100) < hard * 0.8
        low, high = score_difference(first, second, texts.tolist())[1]
        hits.append(low <= 2 / 3 * 0.2 <= high)
    assert 0.92 < np.mean(hits) < 0.995  # standard error: 0.013


def test_the_interval_of_an_average_is_narrower_than_those_of_its_parts():
    low, high = mean_interval([0.5, 0.9], [(0.3, 0.7), (0.8, 0.95)])
    assert low == pytest.approx(0.7 - math.hypot(0.2, 0.1) / 2)
    assert high == pytest.approx(0.7 + math.hypot(0.2, 0.05) / 2)
    assert mean_interval([0.5, 0.9], [(0.3, 0.7), None]) is None


def test_equal_answers_do_not_mean_equal_models():
    answers = [0, 1] * 10
    difference, (low, high) = score_difference(answers, answers)
    one = score_interval(answers)
    assert difference == 0
    # Newcombe's correlation of 10 and 10 equal answers: (10 * 10 - 20 / 2) / sqrt(10 * 10 * 10 * 10) = 0.9.
    assert high == -low == pytest.approx((one[1] - 0.5) * math.sqrt(2 * (1 - 0.9)))
    assert score_difference(answers * 3, answers * 3, [*range(20)] * 3)[1][1] > 0.05


def test_four_times_the_questions_halve_an_interval():
    assert questions_needed((0.4, 0.6), 100, 0.05) == 400


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 2], [1, 2]),
        ([1, math.nan, 3], [1, 2, 3]),
        ([1, 2, 3], [1, 2, math.inf]),
        ([1, 2, 3], [0.1, 0.1, 0.1]),
    ],
)
def test_what_has_no_correlation_is_refused(x, y):
    with pytest.raises(ValueError):  # noqa: PT011
        correlate_values(x, y)
