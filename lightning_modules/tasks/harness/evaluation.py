"""Evaluation on tasks of lm-evaluation-harness: answers, stored results and report."""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.utils import sanitize_list
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.tokenization.chat_templates import check_chat_template
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.tasks.evaluation.evaluation import check_same_settings
from lightning_modules.tasks.evaluation.lm_eval_results import Parts, date_id
from lightning_modules.tasks.harness.intervals import group_intervals, task_intervals
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.tasks import SETS, load_tasks, seed
from lightning_modules.utilities.files import plain, write_atomically, write_json
from lightning_modules.utilities.statistics import Interval, mean_interval
from lightning_modules.visualization.report import Table, as_text_table

log = logging.getLogger(__name__)

_OF_TASKS = ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
"""Tables of the harness's results that have an entry for each task."""


class HarnessEvaluation:
    """Evaluation of a model on tasks of lm-evaluation-harness; results in the folder are reused.

    Results of other settings or of a changed task file are refused; changes of data, and of other files that a task
    file names, are not detected. ``provenance`` identifies the model; ``max_length`` is None if its config has no
    limit.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        tasks: Sequence[str],
        tokenizer: PreTrainedTokenizerFast,
        provenance: Provenance,
        *,
        max_length: int | None,
    ) -> None:
        if config.chat_template:
            check_chat_template(tokenizer, config.system_instruction)
        self.config, self.words, self.tokenizer = config, tasks, tokenizer
        settings: dict[str, Any] = {**provenance._asdict(), "max_length": max_length, "lm_eval": version("lm_eval")}
        names = ("num_fewshot", "limit", "truncation", "chat_template", "system_instruction", "add_special_tokens")
        for option in names:
            settings[option] = getattr(config, option)
        # The default, also if it is given explicitly, is null.
        multiturn = None if config.as_multiturn == config.chat_template else config.as_multiturn
        settings |= {"fewshot_as_multiturn": multiturn, "gen_kwargs": config.generation or None}
        self.results = Results(config.output_folder, settings)
        options: Any = {"include_path": config.include_path, "num_fewshot": config.num_fewshot}
        self.loaded = load_tasks(tasks, **options, done=self.results.read)

    def missing(self, rank: int = 0, processes: int = 1) -> list[str]:
        """Return this process's tasks without a result."""
        files = list(self.loaded.files.items())[rank::processes]
        return [name for name, file in files if self.results.read(name, file) is None]

    def ask(self, backbone: Backbone, rank: int = 0, processes: int = 1) -> None:
        """Ask the missing tasks, and store the result of each at once."""
        model = HarnessModel(backbone, self.tokenizer, self.config)
        for number, name in enumerate(names := self.missing(rank, processes)):
            log.info("Tasks of the harness: %s (%d of %d)", name, number + 1, len(names))
            result = evaluate_task(model, name, self.loaded.tasks[name], bootstrap_iters=1000)
            samples = result.pop("samples")
            if self.config.log_samples:
                write_samples(self.config.output_folder, name, samples)
            self.results.write(name, result, self.loaded.files[name])

    def report(self) -> tuple[str, Parts]:
        """Write ``harness.json`` with all results so far; return their table, and the results in the harness's schema.

        In the file, ``intervals`` are 95% intervals of tasks, groups and sets.
        """
        tasks: dict[str, dict[str, Any]] = {}
        metrics: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {name: {} for name in (*_OF_TASKS, "group_subtasks", "groups")}
        for name, file in self.loaded.files.items():
            if (result := self.results.read(name, file)) is None:
                continue
            for part, by_task in result.pop("lm_eval", {}).items():
                parts[part] |= by_task
            tasks[name], metrics[name], intervals[name] = result, result["metrics"], result.get("intervals", {})
        groups = aggregate(self.loaded.groups, tasks)
        metrics |= groups
        intervals |= {name: group_intervals(self.loaded.groups[name], tasks) for name in groups}
        scores, set_intervals = set_scores(self.words, metrics, intervals)
        content = {
            "model": self.config.model,
            "scores": scores,
            "tasks": tasks,
            "groups": groups,
            "intervals": intervals | set_intervals,
            "settings": self.results.settings,
        }
        write_json(self.results.folder / "harness.json", content)
        for name, group in self.loaded.groups.items():
            parts["group_subtasks"][name] = group.child_names
            if name in groups:
                entry = {"name": name, "alias": group.alias or name, **groups[name]}
                parts["results"][name] = parts["groups"][name] = entry
                parts["versions"][name] = group.version
        return table(content), {name: part for name, part in parts.items() if part or name != "groups"}


def evaluate_task(model: HarnessModel, name: str, task: Task, *, bootstrap_iters: int = 0) -> dict[str, Any]:
    """Evaluate a model on a task; random states and the model's mode are restored.

    ``bootstrap_iters`` is the number of resamples for standard errors of metrics that are not means. The result has the
    task's ``metrics`` as the harness returns them, by name and filter, their ``intervals``, ``lm_eval`` with all
    results in the harness's schema, and ``samples``, its questions and answers.
    """
    # `evaluate` and not `simple_evaluate`, which returns None in every process but the first of a machine: all of them
    # log the metrics.
    config, before, started = model.task_config, model.truncated, time.perf_counter()
    with isolate_rng(), torch.no_grad():
        seed()
        task.set_fewshot_seed(1234)  # as the harness does
        if config.generation and task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value=config.generation, update=True)
        found: Any = evaluate(
            model,
            {"tasks": {name: task}},
            limit=config.limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=True,  # intervals need the scores of the questions
            system_instruction=config.system_instruction,
            apply_chat_template=config.chat_template,
            fewshot_as_multiturn=config.as_multiturn,
        )
    return {
        "metrics": _keep_numbers(found["results"][name]),
        "intervals": task_intervals(task, found["samples"][name]),
        "questions": found["n-samples"][name]["effective"],
        "truncated": model.truncated - before,
        "num_fewshot": found["n-shot"][name],
        "version": found["versions"][name],
        "seconds": time.perf_counter() - started,
        "lm_eval": {part: {name: found[part][name]} for part in _OF_TASKS},
        "samples": found["samples"][name],
    }


def aggregate(groups: Mapping[str, Group], results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the harness's metrics of groups, from the results of `evaluate_task`; incomplete groups are left out."""
    metrics: dict[str, Any] = {
        name: {**result["metrics"], "name": name, "alias": name, "sample_len": result["questions"]}
        for name, result in results.items()
    }
    complete = (group for group in groups.values() if all(task.task_name in results for task in group.get_all_tasks()))
    found = {group.name: _keep_numbers(group.aggregate(metrics)) for group in complete}
    return {name: values for name, values in found.items() if values}


def set_scores(
    words: Iterable[str],
    metrics: Mapping[str, Mapping[str, Any]],
    intervals: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[dict[str, float], dict[str, Interval]]:
    """Return the scores in percent of all sets among the words whose metrics are all known, and their intervals."""
    # A part is a metric of a task, or another score of the set.
    values, ends = _by_metric(metrics), _by_metric(intervals)
    known: dict[str, float] = {}
    for name, parts in chain.from_iterable(SETS[word].scores.items() for word in words if word in SETS):
        if not all(part in values for part in parts):
            continue
        means = [values[part] for part in parts]
        known[name] = values[name] = sum(means) / len(means)
        ends[name] = mean_interval(means, [ends.get(part) for part in parts])
    percent = {name: (100 * ends[name][0], 100 * ends[name][1]) for name in known if ends[name] is not None}
    return {name: 100 * value for name, value in known.items()}, percent


def _by_metric(tables: Mapping[str, Mapping[str, Any]]) -> dict[Any, Any]:
    """Return the known values of tasks by task and metric."""
    return {(task, key): value for task, row in tables.items() for key, value in row.items() if value is not None}


def _keep_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the harness's metrics, without RULER's -1 for lengths that were not measured."""
    numbers = {key: float(value) for key, value in metrics.items() if "," in key and isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if value != -1 or not key.partition(",")[0].isdigit()}


class Results:
    """Folder of results, ``tasks/NAME.json``.

    Reading a result of other settings, or of another version of the user's task file, raises a ``ValueError``.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, dict(settings)

    def write(self, name: str, result: Mapping[str, Any], task_file: str | None = None) -> None:
        """Write the result of a task."""
        write_json(self._result_path(name), {**result, "settings": self._settings_of(task_file)})

    def read(self, name: str, task_file: str | None = None) -> dict[str, Any] | None:
        """Return the stored result, or None."""
        if not (path := self._result_path(name)).is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        check_same_settings(path, content.pop("settings"), self._settings_of(task_file))
        return dict(content)

    def _result_path(self, name: str) -> Path:
        return self.folder / "tasks" / f"{quote(name, safe='')}.json"

    def _settings_of(self, task_file: str | None) -> dict[str, Any]:
        return self.settings | ({"task_file": task_file} if task_file else {})


def write_samples(folder: Path, task: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write ``samples_TASK_TIME.jsonl`` with the questions and answers of a task, whose columns have one type each."""
    lines = []
    for sample in samples:
        arguments = {
            f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(given)}
            for number, given in enumerate(sample["arguments"])
        }
        words = {name: sanitize_list(sample[name]) for name in ("resps", "filtered_resps")}
        row = plain({**sample, **words, "arguments": arguments, "target": str(sample["target"])})
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    name = f"samples_{quote(task, safe='')}"
    earlier = [path for path in folder.glob("samples_*_*.jsonl") if path.name.rpartition("_")[0] == name]
    write_atomically(folder / f"{name}_{date_id()}.jsonl", "".join(lines).encode())
    for path in earlier:
        path.unlink()


def table(result: Mapping[str, Any]) -> str:
    """Format results as text: a row per metric with its 95% interval, then the scores of sets in percent."""
    rows = []
    for kind in ("tasks", "groups"):
        for name, entry in result[kind].items():
            metrics = entry["metrics"] if kind == "tasks" else entry
            about = (str(entry["questions"]), str(entry["num_fewshot"])) if kind == "tasks" else ("", "")
            for key, value in metrics.items():
                metric, _, kept = key.partition(",")
                if metric.endswith("_stderr") or value is None:
                    continue
                interval = result["intervals"].get(name, {}).get(key)
                label = metric if kept == "none" else f"{metric} ({kept})"
                rows.append((name, *about, label, f"{value:.4f}", _format_interval(interval, 4)))
    for name, value in result["scores"].items():
        rows.append((name, "", "", "score, %", f"{value:.1f}", _format_interval(result["intervals"].get(name), 1)))
    head = ("task", "questions", "examples", "metric", "value", "95% interval")
    text = as_text_table(Table(head, rows), left=(0, 3))
    cut = sum(entry["truncated"] for entry in result["tasks"].values())
    if cut:
        text += f"\n{cut:,} prompts exceeded `max_length` = {result['settings']['max_length']} and were truncated."
    return text


def _format_interval(interval: Sequence[float] | None, digits: int) -> str:
    return "" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
