"""Evaluate the trained model on long-context tasks and tasks of lm-evaluation-harness."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from callbacks.requirements import check_names, require_long_context_lm
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.records import Source
from lightning_modules.tasks.evaluation.answers import FOLDER, Answer, Key, write_answers
from lightning_modules.tasks.evaluation.config import Mode, TaskConfig
from lightning_modules.tasks.evaluation.evaluation import describe_setting
from lightning_modules.tasks.evaluation.questions import (
    Question,
    check_questions,
    make_questions,
    put_questions,
    question_keys,
)
from lightning_modules.tasks.evaluation.report import answer_table, figures
from lightning_modules.tasks.evaluation.summary import summarize
from lightning_modules.tasks.harness import split_tasks
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks, hash_task_code
from lightning_modules.tasks.questions.task import Task
from lightning_modules.training.evaluation import records_folder
from lightning_modules.training.facts import loaded_tokenizer
from lightning_modules.training.monitoring.numerics import find_numerics
from lightning_modules.training.preemption import between_steps, interruptible
from lightning_modules.training.sequence_parallel import sequence_group
from lightning_modules.utilities.collectives import gathered
from lightning_modules.visualization.report import as_markdown_table

_STEP_KEY = "longce_tasks_step"
"""Key in a checkpoint for the last step after which the tasks ran."""


class LongContextTasks(Callback):
    """Runs tasks at each validation, or every N steps, and logs the model's scores.

    longce's tasks log, in percent: ``tasks/<task>/<length>``, ``tasks/average/<length>`` over the tasks, and, as RULER
    defines them, ``tasks/weighted_inc``, ``tasks/weighted_dec`` and ``tasks/effective_length`` of these averages (in
    tokens; 0 if no length reaches the threshold). With ``teacher_forced``, they also log ``tasks/answer_perplexity``
    and ``tasks/other_perplexity``, over all questions and by ``/<length>``. TensorBoard also gets scores by length,
    heat maps by length and depth, and some answers. All answers go to ``answers/`` in the folder of the run
    (`lightning_modules.tasks.evaluation.answers`). Tasks of lm-evaluation-harness log ``harness/<task>/<metric>``, and
    so do groups and sets (``harness/LongBench``, in percent).

    The questions are the same each time and are split among the processes, with any strategy that does not shard
    sequences. Weights, training mode and random states do not change, and the time does not count in
    ``train/tokens_per_second``. ``tasks/seconds`` and ``harness/seconds`` are the cost, ``tasks/time_share`` its
    fraction of the time since training began; limit it by ``samples``, ``limit``, ``lengths`` and ``every_n_steps``.

    Args:
        tasks: Names of tasks, groups and sets, import paths and task files, as for ``longce evaluate``.
        lengths: Lengths of prompt and answer together, in tokens.
        samples: Questions per task and length, and per depth if depths are given.
        mode: ``teacher_forced``: the model gets the right answer token by token in a single pass; ``generate``: it
            generates its answer.
        every_n_steps: Run after every N optimizer steps instead of at each validation. ``ModelCheckpoint`` cannot
            monitor such values.
        at_start: Also run before the first step.
        tokenizer: Hub id or local folder; by default the tokenizer of the data, or of the model.
        options: The other fields of `lightning_modules.tasks.evaluation.config.TaskConfig`.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        lengths: Sequence[PositiveInt] = (4096,),
        samples: PositiveInt = 10,
        mode: Mode = "teacher_forced",
        every_n_steps: PositiveInt | None = None,
        at_start: bool = False,
        tokenizer: str | None = None,
        **options: Any,
    ) -> None:
        self.config = config = TaskConfig(tasks=tasks, lengths=lengths, samples=samples, mode=mode, **options)
        ours, self._theirs = split_tasks(tasks)
        config.check_used(ours, self._theirs)
        if mode == "key_tokens":
            raise ValueError(
                "`mode` 'key_tokens' measures an evaluator, not a model in training: use `longce evaluate`, or set"
                " `mode` to 'teacher_forced'."
            )
        self.tasks: list[Task] = []
        self.keys: list[Key] = []
        if ours:
            self.tasks = find_tasks(ours, **config.sources, documents=config.documents)
            self.keys = question_keys(self.tasks, lengths, samples, config.depths)
        # Of the code that runs: its files may change during the training.
        self._task_codes = {task.name: hash_task_code(task) for task in self.tasks}
        self.every_n_steps = every_n_steps
        self.at_start = at_start
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._loaded: list[dict[str, Any]] = []  # tasks and groups of the harness, with their data
        self._prompter: Prompter | None = None
        self._questions: list[Question] = []
        self._train_start: float | None = None
        self._seconds = 0.0
        self._last_step = 0  # the last one after which the tasks ran, with `every_n_steps`
        self._is_resumed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the harness's tasks, so that missing data is reported before the first step."""
        check_names(trainer, LongContextTasks)
        if self._theirs and not self._loaded and stage != "predict":
            from lightning_modules.tasks.harness.tasks import find_names, load_tasks

            manager, names = find_names(self._theirs, self.config.include_path)
            self._loaded = [load_tasks(manager, name, self.config) for name in names]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prepare_questions(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prompter is None:  # `longce validate`
            self._prepare_questions(trainer, pl_module)

    on_test_start = on_validation_start

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._train_start = time.perf_counter()
        self._seconds = 0.0
        was_interrupted = self._is_resumed and self._is_due(trainer.global_step)
        self._is_resumed = False
        if self.at_start or was_interrupted:
            self._log_now(trainer, pl_module)
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._is_due(trainer.global_step) and between_steps(trainer):
            self._log_now(trainer, pl_module)
            self._last_step = trainer.global_step

    def _is_due(self, step: int) -> bool:
        return self.every_n_steps is not None and step != self._last_step and step % self.every_n_steps == 0

    # Not `state_dict`, of which Lightning would refuse two before `check_names` can name the remedy.
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[_STEP_KEY] = self._last_step

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if _STEP_KEY in checkpoint:
            self._last_step = checkpoint[_STEP_KEY]
            self._is_resumed = True

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or (self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING):
            return
        values = self._run_tasks(trainer, pl_module)
        tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
        pl_module.log_dict(tensors, sync_dist=True)  # all but the seconds are equal on all processes

    on_test_epoch_end = on_validation_epoch_end

    def _prepare_questions(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate this process's questions, and check that those of all processes can be generated and asked."""
        pl_module = require_long_context_lm(pl_module, self)
        if sequence_group(trainer.strategy) is not None:
            raise ValueError(
                "LongContextTasks does not support a strategy that shards sequences: remove the callback, and run"
                " `longce evaluate` on the exported model."
            )
        config = self.config
        data = getattr(trainer, "datamodule", None)
        if self._theirs and not isinstance(pl_module.backbone, Backbone):
            raise ValueError("A model on a server cannot do tasks of lm-evaluation-harness: remove them.")
        model = str(pl_module.loading.pretrained_model_name_or_path)
        tokenizer = self.tokenizer or loaded_tokenizer(data)
        if tokenizer is None:
            tokenizer = load_tokenizer(model, revision=pl_module.loading.revision)
        self._prompter = Prompter(tokenizer, **config.prompting)
        if not self.keys:
            return
        pl_module.backbone.check_length(max(key.length for key in self.keys))
        with isolate_rng():  # a user's task may use any global random generator
            check_questions(self.keys, self.tasks, self._prompter, config.seed)
            own = self.keys[trainer.global_rank :: trainer.world_size]
            self._questions = make_questions(own, self.tasks, self._prompter, config.seed)

    def _log_now(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the tasks and log at this step, regardless of `log_every_n_steps`."""
        values = self._run_tasks(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def _run_tasks(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Ask all questions, draw the figures, and return the values to log."""
        pl_module = require_long_context_lm(pl_module, self)
        pl_module.costs.stop_clock()
        started = time.perf_counter()
        values: dict[str, float] = {}
        stopping = interruptible(trainer, communicates=True)
        # Flash attention does not support float32.
        with stopping, isolate_rng(), trainer.precision_plugin.forward_context():
            if self.keys:
                values |= self._run_longce_tasks(trainer, pl_module)
            if self._loaded:
                values |= self._run_harness_tasks(trainer, pl_module)
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()  # key-value caches fragment the memory that training needs
        seconds = time.perf_counter() - started
        self._seconds += seconds
        values["tasks/seconds"] = seconds
        if self._train_start is not None:
            values["tasks/time_share"] = self._seconds / (time.perf_counter() - self._train_start)
        return values

    def _run_longce_tasks(self, trainer: Trainer, pl_module: LongContextLM) -> dict[str, float]:
        assert self._prompter is not None
        questions = self._questions
        generation = self.config.generation
        with interruptible(trainer, communicates=pl_module.backbone.is_sharded):
            asked = put_questions(
                pl_module.backbone, self._prompter, questions, self.config.mode, generation=generation
            )
        answers = {answer.key: answer for answer in chain.from_iterable(gathered(asked))}
        in_order = [answers[key] for key in self.keys]  # the order of a single process
        summary = summarize(in_order)
        self._write(trainer, pl_module, in_order)
        for logger in trainer.loggers:
            if not trainer.is_global_zero or not isinstance(logger, TensorBoardLogger):
                continue
            for name, figure in figures(summary).items():
                logger.experiment.add_figure(f"tasks/{name}", figure, trainer.global_step)
            answers_shown = as_markdown_table(answer_table(in_order))
            logger.experiment.add_text("tasks/answers", answers_shown, trainer.global_step)
        return {f"tasks/{name}": value for name, value in summary.logged().items()}

    def _write(self, trainer: Trainer, module: LongContextLM, answers: Sequence[Answer]) -> None:
        """Write the answers to ``answers/STAGE-step-N.parquet`` in the run's folder."""
        folder = records_folder(trainer)
        if folder is None:
            return
        numerics = find_numerics(trainer, module)
        model = Source(**numerics._asdict(), special_tokens=self.config.add_special_tokens)
        about: dict[str, Any] = {"model": model, "setting": describe_setting(self.config)}
        about["stage"] = stage = "test" if trainer.testing else "val"
        about["step"] = step = trainer.global_step
        identified = [replace(each, **about, task_code=self._task_codes[each.task]) for each in answers]
        write_answers(folder / FOLDER / f"{stage}-step-{step}.parquet", identified)

    def _run_harness_tasks(self, trainer: Trainer, pl_module: LongContextLM) -> dict[str, float]:
        """Return the metrics of all tasks, groups and sets of the harness, by the names under which they are logged."""
        from lightning_modules.tasks.harness.evaluation import evaluate_tasks
        from lightning_modules.tasks.harness.model import HarnessModel
        from lightning_modules.tasks.harness.results import list_metrics, merge_results, summarize_results

        assert self._prompter is not None
        started = time.perf_counter()
        model = HarnessModel(pl_module.backbone, self._prompter.tokenizer, self.config)
        found = []
        for loaded in self._loaded:
            found.append(evaluate_tasks(model, loaded))
            del found[-1]["samples"]  # all prompts, which may be gigabytes
        if model.truncated:
            rank_zero_info(f"{model.truncated} prompts exceeded {model.max_length} tokens and were truncated.")
        content = summarize_results(merge_results(found), self._theirs)
        logged = {f"harness/{name}": value for name, value in content["scores"].items()}
        for name, values in list_metrics(content).items():
            for key, value in values.items():
                logged[f"harness/{name}/{key.removesuffix(',none')}"] = value
        return {"harness/seconds": time.perf_counter() - started, **logged}
