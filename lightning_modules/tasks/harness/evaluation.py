"""One task of lm-evaluation-harness, asked of a model, and what comes of it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.tasks import TaskSet, quiet, seed

FEWSHOT_SEED = 1234
"""Of the examples in prompts: the harness's own."""


def evaluate_task(
    model: HarnessModel,
    name: str,
    task: Task,
    *,
    limit: float | None = None,
    chat_template: bool = False,
    log_samples: bool = False,
    bootstrap_iters: int = 0,
) -> dict[str, Any]:
    """Ask a task of a model; random states and the model's mode are as before in the end.

    Args:
        model: The model.
        name: Of the task.
        task: It, with its data.
        limit: Questions to ask, or below 1 their share; all by default.
        chat_template: Whether prompts are turns of the tokenizer's chat template.
        log_samples: Whether each question and answer comes back.
        bootstrap_iters: Resamples for standard errors of metrics that are no means; 0 for no standard errors.

    Returns:
        ``metrics`` of the task, by name and filter, as the harness gives them; ``questions``, how many there were;
        ``truncated``, how many prompts were too long; ``num_fewshot``, ``version``, ``seconds``; and ``samples``.
    """
    before, started = model.truncated, time.perf_counter()
    with isolate_rng(), quiet():
        seed()
        task.set_fewshot_seed(FEWSHOT_SEED)
        found: Any = evaluate(
            model,
            {"tasks": {name: task}},
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=log_samples,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
        )
    result = {
        "metrics": _plain(found["results"][name]),
        "questions": found["n-samples"][name]["effective"],
        "truncated": model.truncated - before,
        "num_fewshot": found["n-shot"][name],
        "version": found["versions"][name],
        "seconds": time.perf_counter() - started,
    }
    return {**result, "samples": found["samples"][name]} if log_samples else result


def aggregate(groups: Sequence[Group], results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Metrics of groups from those of their tasks, as the harness does it; a group without any is left out.

    Args:
        groups: The innermost first.
        results: Of `evaluate_task`, by task.
    """
    metrics: dict[str, Any] = {
        name: {**result["metrics"], "name": name, "alias": name, "sample_len": result["questions"]}
        for name, result in results.items()
    }
    found = {}
    for group in groups:
        metrics[group.name] = group.aggregate(metrics)
        if plain := _plain(metrics[group.name]):
            found[group.name] = plain
    return found


def scores(task_set: TaskSet, metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The scores of a set in percent, of those for which all tasks are known.

    Args:
        task_set: The set.
        metrics: Of tasks and groups.
    """
    known: dict[str, float] = {}
    for name, parts in task_set.scores.items():
        values = [
            known.get(part) if isinstance(part, str) else _percent(metrics.get(part[0], {}).get(part[1]))
            for part in parts
        ]
        numbers = [value for value in values if value is not None]
        if numbers and len(numbers) == len(values):
            known[name] = sum(numbers) / len(numbers)
    return known


def _percent(value: Any) -> float | None:
    return 100 * value if isinstance(value, int | float) else None


def _plain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what the harness says of a task: RULER's -1 stands for a length that was not asked for."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if "," in key
        and isinstance(value, int | float)
        and not (key.partition(",")[0].removesuffix("_stderr").isdigit() and value == -1)
    }
