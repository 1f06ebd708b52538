"""Evaluation on tasks of lm-evaluation-harness: answers, stored results and report."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.evaluator import evaluate
from lm_eval.loggers import EvaluationTracker
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.provenance import Provenance
from lightning_modules.models.tokenization.chat_templates import check_chat_template
from lightning_modules.tasks.evaluation.config import EvaluationConfig
from lightning_modules.tasks.evaluation.evaluation import check_same_settings
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.results import format_results, merge_results, summarize_results
from lightning_modules.tasks.harness.tasks import file_hash, find_names, load_tasks, seed
from lightning_modules.utilities.files import write_json

log = logging.getLogger(__name__)


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
        self.config = config
        self.words = tasks
        self.tokenizer = tokenizer
        self.settings: dict[str, Any] = {
            **provenance._asdict(),
            "max_length": max_length,
            "lm_eval": version("lm_eval"),
        }
        names = ("num_fewshot", "limit", "truncation", "chat_template", "system_instruction", "add_special_tokens")
        for option in names:
            self.settings[option] = getattr(config, option)
        self.settings["fewshot_as_multiturn"] = config.as_multiturn
        self.settings["gen_kwargs"] = config.generation or None
        self.manager, self.names = find_names(tasks, config.include_path)
        self.loaded = {}
        for name in self.missing():  # so that missing data is reported before the model is loaded
            self.loaded[name] = load_tasks(self.manager, name, config)
        self._tracker = EvaluationTracker(output_path=str(config.output_folder / "results.json"))
        self._tracker.date_id = datetime.now().isoformat().replace(":", "-")

    def missing(self, rank: int = 0, processes: int = 1) -> list[str]:
        """Return the names of this process's tasks and groups without a result."""
        return [name for name in self.names[rank::processes] if self._read(name) is None]

    def ask(self, backbone: Backbone, rank: int = 0, processes: int = 1) -> None:
        """Evaluate the missing tasks, and store the result of each at once."""
        model = HarnessModel(backbone, self.tokenizer, self.config)
        for name in self.missing(rank, processes):
            log.info("Tasks of the harness: %s", name)
            found = evaluate_tasks(model, self.loaded[name], bootstrap_iters=1000)
            samples = found.pop("samples")
            if self.config.log_samples:
                for task, of_task in samples.items():
                    self._tracker.save_results_samples(task, of_task)
            write_json(self._path(name), {**found, "settings": self._settings_of(name)})

    def report(self) -> str:
        """Write ``results_TIME.json`` with all results so far, and return their table."""
        stored = [found for found in map(self._read, self.names) if found is not None]
        results = merge_results(stored)
        truncated = sum(found["truncated"] for found in stored)
        self._write(results, truncated)
        text = format_results(summarize_results(results, self.words))
        if truncated:
            text += f"\n{truncated:,} prompts exceeded `max_length` = {self.settings['max_length']} and were truncated."
        return text

    def _write(self, results: dict[str, Any], truncated: int) -> None:
        """Write the results in the harness's schema, in place of those of an earlier call."""
        for earlier in self.config.output_folder.glob("results_*.json"):
            if json.loads(earlier.read_bytes()).get("model_source") == "longce":
                earlier.unlink()
        template = self.tokenizer.chat_template if self.config.chat_template else None
        self._tracker.general_config_tracker.log_experiment_args(
            "longce",
            {"pretrained": self.config.model},
            self.config.system_instruction,
            template,
            self.config.as_multiturn,
        )
        about = {"model": "longce", "model_args": {"pretrained": self.config.model}, **self.settings}
        about |= {"tasks": list(self.words), "truncated": truncated}
        self._tracker.save_results_aggregated({**results, "config": about, "date": time.time()})

    def _path(self, name: str) -> Path:
        return self.config.output_folder / "tasks" / f"{quote(name, safe='')}.json"

    def _settings_of(self, name: str) -> dict[str, Any]:
        return {**self.settings, "task_file": file_hash(self.manager, name)}

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the stored result, or None; raise a ``ValueError`` if it has other settings."""
        path = self._path(name)
        if not path.is_file():
            return None
        content = dict(json.loads(path.read_bytes()))
        if "results" not in content:
            raise ValueError(f"'{path}' is a result of longce 0.1.0, which reads it: choose another `--output`.")
        check_same_settings(path, content.pop("settings"), self._settings_of(name))
        return content


def evaluate_tasks(model: HarnessModel, loaded: Mapping[str, Any], *, bootstrap_iters: int = 0) -> dict[str, Any]:
    """Evaluate a model on tasks of `load_tasks`; random states and the model's mode are restored.

    ``bootstrap_iters`` is the number of resamples for standard errors of metrics that are not means. The result is that
    of the harness, in every process, with ``seconds`` and the number of ``truncated`` prompts.
    """
    # `simple_evaluate` would load the tasks again, inspect the machine for 4 s, and return None in other processes.
    config = model.task_config
    before = model.truncated
    started = time.perf_counter()
    with isolate_rng(), torch.no_grad():
        seed()
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(1234)  # as the harness does
        found: Any = evaluate(
            model,
            loaded,
            limit=config.limit,
            bootstrap_iters=bootstrap_iters,
            system_instruction=config.system_instruction,
            apply_chat_template=config.chat_template,
            fewshot_as_multiturn=config.as_multiturn,
        )
    return {**found, "seconds": time.perf_counter() - started, "truncated": model.truncated - before}
