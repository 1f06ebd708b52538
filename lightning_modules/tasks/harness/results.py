"""Results of lm-evaluation-harness: its tables, and scores of sets of its tasks; importable without it."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from lightning_modules.visualization.report import Table, as_text_table


class TaskSet(NamedTuple):
    """Tasks that are reported together, below ``lm_eval/tasks`` in ``folders``: indexing all folders takes 15 s.

    A score is the mean of metrics of tasks, such as ``("mmlu", "acc,none")``, or of other scores by name.
    """

    tasks: tuple[str, ...]
    folders: tuple[str, ...]
    scores: Mapping[str, Sequence[Any]]


_LONGBENCH = {
    "Single-Document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Document QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot Learning": ("trec", "triviaqa", "samsum"),
    "Synthetic Tasks": ("passage_count", "passage_retrieval_en"),
    "Code Completion": ("lcc", "repobench-p"),
}
_SHORT = {
    "MMLU": ("mmlu", "acc,none"),
    "ARC-C": ("arc_challenge", "acc,none"),
    "RACE": ("race", "acc,none"),
    "BBH": ("bbh_cot_fewshot", "exact_match,get-answer"),
    "TruthfulQA": ("truthfulqa_mc2", "acc,none"),
    "CommonsenseQA": ("commonsense_qa", "acc,none"),
}


def _make_short_set() -> TaskSet:
    folders = ("mmlu/default", "arc", "race", "bbh/cot_fewshot", "truthfulqa", "commonsense_qa")
    tasks = tuple(task for task, _ in _SHORT.values())
    return TaskSet(tasks, folders, scores={name: [metric] for name, metric in _SHORT.items()})


def _make_longbench_set() -> TaskSet:
    tasks: list[str] = []
    scores: dict[str, Any] = {}
    for category, names in _LONGBENCH.items():
        members = [f"longbench_{name}" for name in names]
        tasks += members
        scores[category] = [(task, "score,none") for task in members]
    scores["LongBench"] = list(_LONGBENCH)
    return TaskSet(tuple(tasks), ("longbench",), scores)


SETS = {"short": _make_short_set(), "longbench": _make_longbench_set()}
"""Sets of tasks, with scores named as in the tables of Fang et al. (2025).

``short`` has the six tasks of Table 10. The paper does not report the number of examples in the prompt or the metric;
here they are the harness's defaults (no examples, three with a chain of thought for BBH), and accuracy. ``longbench``
has the 16 English tasks of LongBench; its score is the mean of six categories, as in Table 8."""


def merge_results(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the tables of several results of `evaluate_tasks`, such as ``results`` and ``configs``, by task."""
    merged: dict[str, Any] = {}
    for part in parts:
        for table, by_task in part.items():
            if isinstance(by_task, Mapping):
                merged.setdefault(table, {}).update(by_task)
    return merged


def summarize_results(results: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the metrics of tasks and groups, and the scores in percent of sets whose metrics are all known."""
    content: dict[str, Any] = {"tasks": {}, "groups": {}, "scores": {}}
    values: dict[Any, float] = {}  # by task and metric, or by name of a score
    for name, row in results.get("results", {}).items():
        metrics = _keep_numbers(row)
        if name not in results["n-samples"]:  # a group
            if metrics:  # some groups have no metrics
                content["groups"][name] = metrics
        else:
            counts = {"questions": results["n-samples"][name]["effective"], "num_fewshot": results["n-shot"][name]}
            content["tasks"][name] = {"metrics": metrics, **counts}
        for key, value in metrics.items():
            values[name, key] = value
    for word in words:
        if word in SETS:
            content["scores"] |= _score_set(SETS[word], values)
    return content


def _score_set(tasks: TaskSet, values: dict[Any, float]) -> dict[str, float]:
    """Return the scores in percent whose metrics are known, and add them to the values, from 0 to 1."""
    scores = {}
    for score, parts in tasks.scores.items():
        if all(part in values for part in parts):
            values[score] = fmean(values[part] for part in parts)
            scores[score] = 100 * values[score]
    return scores


def _keep_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the harness's metrics, without RULER's -1 for lengths that were not measured."""
    numbers = {}
    for key, value in metrics.items():
        metric, comma, _ = key.partition(",")
        is_number = bool(comma) and isinstance(value, int | float)
        if is_number and not (metric.isdigit() and value == -1):
            numbers[key] = float(value)
    return numbers


def list_metrics(content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of tasks, then those of groups, by name."""
    metrics = {name: task["metrics"] for name, task in content["tasks"].items()}
    return metrics | content["groups"]


def format_results(content: Mapping[str, Any]) -> str:
    """Format results as text: a row per metric with its standard error, then the scores of sets in percent."""
    rows = []
    for name, metrics in list_metrics(content).items():
        task = content["tasks"].get(name, {"questions": "", "num_fewshot": ""})
        for key, value in metrics.items():
            metric, _, kept = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            label = metric if kept == "none" else f"{metric} ({kept})"
            error = metrics.get(f"{metric}_stderr,{kept}")
            shown = "" if error is None else f"{error:.4f}"
            rows.append((name, str(task["questions"]), str(task["num_fewshot"]), label, f"{value:.4f}", shown))
    for name, value in content["scores"].items():
        rows.append((name, "", "", "score, %", f"{value:.1f}", ""))
    head = ("task", "questions", "examples", "metric", "value", "standard error")
    return as_text_table(Table(head, rows), left=(0, 3))
