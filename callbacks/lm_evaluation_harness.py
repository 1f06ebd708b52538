"""Tasks of lm-evaluation-harness while training."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from callbacks.same_names import check_single
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.tasks.harness import Truncation, check_installed
from lightning_modules.training.export import loaded_tokenizer
from lightning_modules.training.preemption import between_steps
from lightning_modules.training.sequence_parallel import sequence_group
from lightning_modules.utilities.files import write_atomically
from lightning_modules.utilities.plain_json import plain

if TYPE_CHECKING:
    from lightning_modules.tasks.harness.tasks import LoadedTasks


class LMEvaluationHarness(Callback):
    """Asks tasks of lm-evaluation-harness of the model in training, and logs what comes of them.

    Logged as ``harness/<task>/<metric>``, groups and sets alike (``harness/LongBench``, in percent), at each
    validation, or every so many steps. Processes share the questions out. Random states, and which modules are in
    training mode, are as before. The time it takes is no training time in ``train/tokens_per_second``.

    Generating answers is slow: bound it by `limit` and `every_n_steps`; ``harness/seconds`` says what it takes.

    Args:
        tasks: Names of tasks or groups of the harness, task files (YAML; they may run code of their folder), and the
            sets ``short``, ``longbench`` and ``ruler`` of ``longce harness``.
        include_path: Folder of further task files, which win over those of the harness.
        num_fewshot: Examples in each prompt, for tasks that take any; by default as each task says.
        limit: Questions to ask of each task, or below 1 their share; all by default.
        every_n_steps: Ask behind every so many optimizer steps, instead of at each validation. Such values cannot be
            monitored by ``ModelCheckpoint``.
        lengths: Of RULER's prompts, in tokens; a single one with `limit`.
        max_length: Tokens that the model may read and generate together; by default those of its config.
        truncation: Where prompts that are too long lose tokens.
        chat_template: Whether prompts are turns of the tokenizer's chat template.
        batch_tokens: Tokens of a pass that scores, padding included.
        tokenizer: Hub id or folder; by default that of the data, or of the model.
        log_samples: Write questions and answers to ``harness/step-<step>/<task>.jsonl`` in the logger's folder.

    Raises:
        ValueError: If the extra `eval` is not installed, or no task is named; at setup, if a task is unknown or lacks
            its data, there are several such callbacks, or several processes share the tokens of a row.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        include_path: str | None = None,
        num_fewshot: NonNegativeInt | None = None,
        limit: PositiveFloat | None = None,
        every_n_steps: PositiveInt | None = None,
        lengths: Sequence[PositiveInt] = (4096,),
        max_length: PositiveInt | None = None,
        truncation: Truncation = "middle",
        chat_template: bool = False,
        batch_tokens: PositiveInt = 16_384,
        tokenizer: str | None = None,
        log_samples: bool = False,
    ) -> None:
        check_installed()
        if isinstance(tasks, str) or not tasks:
            raise ValueError(f"`tasks` must be a list of names, got {tasks!r}.")
        if limit is not None and len(lengths) > 1:
            raise ValueError("`limit` would ask questions of the first of `lengths` only: give one length at a time.")
        self.tasks, self.lengths = list(tasks), list(lengths)
        self.limit, self.every_n_steps = limit, every_n_steps
        self.chat_template, self.log_samples = chat_template, log_samples
        self._reading: dict[str, Any] = {
            "max_length": max_length,
            "truncation": truncation,
            "batch_tokens": batch_tokens,
        }
        self._loading: dict[str, Any] = {"include_path": include_path, "num_fewshot": num_fewshot}
        self._tokenizer = tokenizer
        self._loaded: dict[str, LoadedTasks] = {}
        self._asked_at = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the tasks: what is missing is missing before the first step."""
        check_single(trainer, LMEvaluationHarness, lambda callback: ", ".join(callback.tasks), "harness/seconds, ..")
        if self._loaded or stage == "predict":
            return
        if sequence_group(trainer.strategy) is not None:
            raise ValueError(
                "LMEvaluationHarness asks whole questions of each process, and here several share the tokens of a row:"
                " remove the callback, and run `longce harness` on the exported model."
            )
        from lightning_modules.tasks.harness.tasks import TaskLoader

        name = self._tokenizer or str(pl_module.hparams.get("pretrained_model_name_or_path"))
        loader = TaskLoader(self.tasks, lengths=self.lengths, tokenizer=name, **self._loading)
        self._loaded = {name: loader.load(name) for name in loader.names}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked_at = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = self.every_n_steps is not None and step != self._asked_at and step % self.every_n_steps == 0
        if due and between_steps(trainer):
            self._asked_at = step
            values = self._ask(trainer, pl_module)
            for logger in trainer.loggers:  # at this very step, whatever `log_every_n_steps` says
                logger.log_metrics(values, step=step)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or (self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING):
            return
        pl_module.log_dict(self._ask(trainer, pl_module), sync_dist=True)

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log_dict(self._ask(trainer, pl_module), sync_dist=True)

    def _ask(self, trainer: Trainer, pl_module: Any) -> dict[str, float]:
        """Metrics of all tasks, groups and sets, by the names they are logged under."""
        from lightning_modules.tasks.harness.evaluation import aggregate, evaluate_task, scores
        from lightning_modules.tasks.harness.model import HarnessModel
        from lightning_modules.tasks.harness.tasks import task_sets

        if isinstance(pl_module, LongContextLM):
            pl_module.stop_clock()
        started = time.perf_counter()
        model = HarnessModel(pl_module.backbone, self._find_tokenizer(trainer, pl_module), **self._reading)
        options: dict[str, Any] = {"limit": self.limit, "chat_template": self.chat_template}
        metrics: dict[str, dict[str, float]] = {}
        with trainer.precision_plugin.forward_context():  # flash attention takes no float32
            for loaded in self._loaded.values():
                found = {
                    name: evaluate_task(model, name, task, log_samples=self.log_samples, **options)
                    for name, task in loaded.tasks.items()
                }
                self._write_samples(trainer, found)
                metrics |= {name: result["metrics"] for name, result in found.items()}
                metrics |= aggregate(loaded.groups, found)
        if model.truncated:
            rank_zero_info(f"{model.truncated} prompts were longer than {model.max_length} tokens and were cut.")
        sets = [task_set for name, task_set in task_sets(self.lengths).items() if name in self.tasks]
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()  # training would not find the caches' memory in pieces that it can use
        logged = {"harness/seconds": time.perf_counter() - started}
        logged |= {f"harness/{name}": value for one in sets for name, value in scores(one, metrics).items()}
        for name, values in metrics.items():
            logged |= {f"harness/{name}/{key.removesuffix(',none')}": value for key, value in values.items()}
        return logged

    def _find_tokenizer(self, trainer: Trainer, pl_module: LightningModule) -> PreTrainedTokenizerFast:
        data = None if self._tokenizer is not None else loaded_tokenizer(getattr(trainer, "datamodule", None))
        return data or load_tokenizer(self._tokenizer or str(pl_module.hparams["pretrained_model_name_or_path"]))

    def _write_samples(self, trainer: Trainer, found: dict[str, dict[str, Any]]) -> None:
        if not self.log_samples:
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "harness" / f"step-{trainer.global_step}"
        if not trainer.is_global_zero:  # now: the folder's name is the first process's, which tells it to all
            return
        for name, result in found.items():
            lines = [json.dumps(plain(sample)) + "\n" for sample in result["samples"]]
            write_atomically(folder / f"{name}.jsonl", "".join(lines).encode())
