"""95% intervals of the metrics of lm-evaluation-harness, whose own results have standard errors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api import metrics as aggregations
from lm_eval.api.group import Group
from lm_eval.api.task import Task

from lightning_modules.utilities.statistics import Interval, mean_interval, score_interval, weighted_mean_interval

_OF_MEANS = {
    aggregations.perplexity: lambda mean: math.exp(-mean),
    aggregations.weighted_perplexity: lambda mean: math.exp(-mean),
    aggregations.bits_per_byte: lambda mean: -mean / math.log(2),
}
"""Aggregations that are functions of a mean log-likelihood, in nats."""


def task_intervals(task: Task, samples: Iterable[Mapping[str, Any]]) -> dict[str, Interval]:
    """Return the intervals of a task's metrics by name and filter, from its questions, which count as independent.

    Wilson's for scores from 0 to 1, Student's for other means and for perplexities. Metrics of a whole corpus, such as
    BLEU, have none.
    """
    values: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        for name in sample["metrics"]:
            values.setdefault((name, sample["filter"]), []).append(sample[name])
    found = {}
    for (name, kept), each in values.items():
        interval = _interval(task.aggregation().get(name, aggregations.mean), each)
        if interval is not None:
            found[f"{name},{kept}"] = interval
    return found


def _interval(aggregation: Any, values: Sequence[Any]) -> Interval | None:
    of_mean = _OF_MEANS.get(aggregation)
    if of_mean is None and aggregation is not aggregations.mean:
        return None
    pairs = np.array([value if isinstance(value, tuple) else (value, 1) for value in values], dtype=np.float64)
    means, weights = pairs[:, 0] / pairs[:, 1], pairs[:, 1]
    if of_mean is None and means.min() >= 0 and means.max() <= 1:
        return score_interval(means)
    interval = weighted_mean_interval(means, weights)
    if interval is None or of_mean is None:
        return interval
    low, high = sorted(map(of_mean, interval))
    return low, high


def group_intervals(group: Group, results: Mapping[str, Mapping[str, Any]]) -> dict[str, Interval]:
    """Return the intervals of a group's means over its tasks, by name and filter, from results of `evaluate_task`."""
    tasks = [results[task.task_name] for task in group.get_all_tasks()]
    found = {}
    for metric in group.aggregate_metric_list or ():
        if metric.aggregation != "mean":
            continue
        names = dict.fromkeys(key for task in tasks for key in task["metrics"])
        for key in (name for name in names if name.startswith(f"{metric.metric},")):
            measured = [task for task in tasks if key in task["metrics"]]
            means = [task["metrics"][key] for task in measured]
            intervals = [task.get("intervals", {}).get(key) for task in measured]
            weights = [task["questions"] if metric.weight_by_size else 1 for task in measured]
            interval = mean_interval(means, intervals, weights)
            if interval is not None:
                found[key] = interval
    return found
