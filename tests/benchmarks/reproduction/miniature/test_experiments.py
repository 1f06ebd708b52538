import math

import pytest
import torch

from benchmarks.reproduction.miniature.experiments import classifier_scores, correlation, equal_compute, flops_ratio
from benchmarks.reproduction.miniature.settings import Windows


def curve(*entries):
    return [dict(zip(("step", "cpu_seconds", "accuracy"), entry, strict=True)) for entry in entries]


def test_gain_at_equal_steps_time_and_flops():
    cross_entropy = curve((0, 0.0, 0.2), (100, 10.0, 0.4), (200, 20.0, 0.5), (300, 30.0, 0.7))
    longce = curve((0, 0.0, 0.2), (100, 14.0, 0.5), (200, 28.0, 0.6))
    gain = equal_compute(cross_entropy, longce, 200, 1.25)
    assert gain["steps"] == pytest.approx(0.6 - 0.5)
    assert gain["cpu_seconds"] == pytest.approx(0.6 - (0.5 + 0.8 * 0.2))
    assert gain["flops"] == pytest.approx(0.6 - (0.5 + 0.5 * 0.2))
    assert gain["cpu_ratio"] == pytest.approx(1.4)


def test_the_budget_ends_where_cross_entropy_ends():
    cross_entropy = curve((0, 0.0, 0.2), (100, 10.0, 0.4))
    longce = curve((0, 0.0, 0.2), (50, 7.0, 0.3), (100, 14.0, 0.5))
    gain = equal_compute(cross_entropy, longce, 100, 1.25)
    assert gain["steps"] == pytest.approx(0.1)
    assert gain["cpu_seconds"] == pytest.approx(0.3 + 3 / 7 * 0.2 - 0.4)
    assert gain["flops"] == pytest.approx(0.3 + (100 / 1.25 - 50) / 50 * 0.2 - 0.4)


def test_flops_of_a_step_count_the_windows(settings):
    # Rows of 64, K = 16, d = 8: windows of 24 tokens from 8, 16, 24, 32 and 40; that of 0 is not computed.
    assert flops_ratio(settings) == pytest.approx(1 + 5 * 24 / (3 * 64))
    assert flops_ratio(settings, Windows(32, 32)) == pytest.approx(1)
    assert flops_ratio(settings, Windows(16, 40)) == pytest.approx(1 + 24 / (3 * 64))


def test_classifier_scores_of_counted_tokens():
    predicted = torch.tensor([True, True, True, False, False, False, False, False])
    true = torch.tensor([True, True, False, True, False, False, False, False])
    scores = classifier_scores(predicted, true)
    assert scores == pytest.approx(
        {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "accuracy": 6 / 8, "balanced_accuracy": (2 / 3 + 4 / 5) / 2}
    )
    nothing = classifier_scores(torch.zeros(8, dtype=torch.bool), true)
    assert (nothing["precision"], nothing["balanced_accuracy"]) == (0, 0.5)
    no_answers = classifier_scores(predicted, torch.zeros(8, dtype=torch.bool))
    assert (no_answers["recall"], no_answers["accuracy"]) == (0, 5 / 8)


def test_an_undefined_correlation_says_why():
    assert correlation([1.0, math.nan, 2.0], [0.1, 0.2, 0.3])["undefined"] == "1 of 3 values are not finite"
    found = correlation([3.0, 2.0, 1.0, 1.5, 0.5], [0.1, 0.2, 0.4, 0.3, 0.5])
    assert found["spearman"] == pytest.approx(-1)
    assert found["spearman_interval"][0] == pytest.approx(-1)
