"""Intervals of the harness's metrics against formulas."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from lm_eval.api import metrics
from scipy import stats

from lightning_modules.tasks.harness.intervals import group_intervals, task_intervals
from lightning_modules.utilities.statistics import score_interval

LOSSES = [(-9.0, 4), (-2.0, 4), (-5.0, 4), (-3.0, 4), (-7.0, 4), (-4.0, 4)]


def test_metrics_of_a_task():
    aggregations = {"acc": metrics.mean, "bits_per_byte": metrics.bits_per_byte, "bleu": metrics.bleu}
    samples = [
        {"filter": "none", "metrics": list(aggregations), "acc": number % 2, "bits_per_byte": loss, "bleu": ("a", "a")}
        for number, loss in enumerate(LOSSES)
    ]
    found = task_intervals(SimpleNamespace(aggregation=lambda: aggregations), samples)
    assert found.keys() == {"acc,none", "bits_per_byte,none"}
    assert found["acc,none"] == score_interval([0, 1] * 3)
    bits = [-loss / size / math.log(2) for loss, size in LOSSES]
    assert sum(found["bits_per_byte,none"]) / 2 == pytest.approx(metrics.bits_per_byte(LOSSES))
    expected = stats.t.interval(0.95, 5, np.mean(bits), stats.sem(bits))
    assert found["bits_per_byte,none"] == pytest.approx(expected)


@pytest.mark.parametrize(("by_size", "weights"), [(True, (0.75, 0.25)), (False, (0.5, 0.5))])
def test_means_of_a_group(by_size, weights):
    metric = SimpleNamespace(metric="acc", aggregation="mean", weight_by_size=by_size)
    tasks = [SimpleNamespace(task_name=name) for name in ("long", "short")]
    group = SimpleNamespace(aggregate_metric_list=[metric], get_all_tasks=lambda: tasks)
    results = {
        "long": {"metrics": {"acc,none": 0.5}, "intervals": {"acc,none": (0.4, 0.6)}, "questions": 30},
        "short": {"metrics": {"acc,none": 0.9}, "intervals": {"acc,none": (0.6, 1.0)}, "questions": 10},
    }
    low, high = group_intervals(group, results)["acc,none"]
    mean = weights[0] * 0.5 + weights[1] * 0.9
    assert low == pytest.approx(mean - math.hypot(weights[0] * 0.1, weights[1] * 0.3))
    assert high == pytest.approx(mean + math.hypot(weights[0] * 0.1, weights[1] * 0.1))
