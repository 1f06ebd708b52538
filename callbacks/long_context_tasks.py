"""Long-context tasks put to the model in training."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from callbacks.same_names import check_single
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.tasks.evaluation.plots import as_pixels, figures
from lightning_modules.tasks.evaluation.questions import (
    Depths,
    Question,
    first_of_each,
    make_questions,
    question_keys,
    warn_of_unknown_tokens,
)
from lightning_modules.tasks.evaluation.report import answer_table
from lightning_modules.tasks.evaluation.runs import Mode, TaskResult, put_questions
from lightning_modules.tasks.evaluation.summary import Summary, summarise
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.training.preemption import between_steps
from lightning_modules.training.sequence_parallel import sequence_group
from lightning_modules.visualization.report import as_markdown_table


class LongContextTasks(Callback):
    """Puts long-context tasks to the model at each validation, or every so many steps, and logs its scores.

    Logged, in percent: ``tasks/<task>/<length>``, ``tasks/average/<length>`` over the tasks, and of these averages, as
    RULER defines them, ``tasks/weighted_inc``, ``tasks/weighted_dec`` and ``tasks/effective_length`` (tokens; 0 if no
    length will do). With forced answers also ``tasks/answer_perplexity`` and ``tasks/other_perplexity``, over all
    questions and by ``/<length>``. To TensorBoard besides: scores by length, heat maps by length and depth, curves by
    depth, and some answers.

    The same questions are put each time. They are made before training and shared out among the processes, with any
    strategy that divides no rows. Training goes on as if there had been none: neither weights nor modes nor random
    numbers change. What it costs is logged as ``tasks/seconds`` of a round and ``tasks/time_share`` of all time since
    training began, and bounded by ``samples``, by fewer ``lengths`` or by ``every_n_steps``.

    Args:
        tasks: Names of tasks or groups of tasks (``ruler_synthetic``, ``longeval``, ``lost_in_the_middle``, ..), or
            import paths of tasks of your own.
        lengths: Tokens of prompt and answer together.
        samples: Questions of each task and length, and of each depth if depths are asked for.
        mode: ``teacher_forced``: the model is given the right answer token by token, which takes a single pass;
            ``generate``: it writes its answer.
        depths: How many evenly spaced depths, or which ones, from 0 (front) to 1 (end), answers stand at; by default
            each task draws them.
        every_n_steps: Put them behind every so many optimizer steps instead of at each validation. Such values cannot
            be monitored by ``ModelCheckpoint``.
        at_start: Put them before the first step, too.
        seed: Of all that is random in the questions.
        haystack: Folder of text files to hide needles in; made-up prose by default.
        squad: Local file of SQuAD, for ``qa_1``.
        hotpot: Local file of HotpotQA, for ``qa_2``.
        nq_open: Local file for ``multi_document_qa``; made-up lives by default.
        documents: Passages of ``multi_document_qa``; by default as many as the length allows.
        tokenizer: Hub id or local folder; by default that of the data module.
        chat_template: Whether the prompt is the user's turn of the tokenizer's chat template.
        add_special_tokens: Whether the tokenizer adds its own where there is no chat template.

    Raises:
        ValueError: If a task, a file or a number cannot be used; at setup, if there are several such callbacks; before
            training, if there is no tokenizer, a length is too short for a task or too long for the model, or several
            processes share the tokens of a row.
    """

    def __init__(
        self,
        tasks: list[str],
        lengths: list[PositiveInt],
        samples: PositiveInt = 10,
        mode: Mode = "teacher_forced",
        depths: Depths = None,
        every_n_steps: PositiveInt | None = None,
        at_start: bool = False,
        seed: int = 0,
        haystack: str | None = None,
        squad: str | None = None,
        hotpot: str | None = None,
        nq_open: str | None = None,
        documents: PositiveInt | None = None,
        tokenizer: str | None = None,
        chat_template: bool = False,
        add_special_tokens: bool = True,
    ) -> None:
        sources: dict[str, Any] = {"haystack": haystack, "squad": squad, "hotpot": hotpot, "nq_open": nq_open}
        self.tasks = find_tasks(tasks, **sources, documents=documents)
        self.keys = question_keys(self.tasks, lengths, samples, depths)
        self.mode: Mode = mode
        self.every_n_steps, self.at_start, self.seed = every_n_steps, at_start, seed
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self._prompting = {"chat_template": chat_template, "add_special_tokens": add_special_tokens}
        self._prompter: Prompter | None = None
        self._questions: list[Question] = []
        self._began: float | None = None
        self._seconds = 0.0
        self._put_at = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def described(callback: LongContextTasks) -> str:
            return ", ".join(task.name for task in callback.tasks)

        check_single(trainer, LongContextTasks, described, "tasks/average/<length>, ..")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._prepare(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prompter is None:  # `longce validate`
            self._prepare(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._seconds, self._put_at = time.perf_counter(), 0.0, trainer.global_step
        if self.at_start:
            self._log_directly(trainer, self._round(trainer, pl_module))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = self.every_n_steps is not None and step != self._put_at and step % self.every_n_steps == 0
        if due and between_steps(trainer):
            self._put_at = step
            self._log_directly(trainer, self._round(trainer, pl_module))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or (self.every_n_steps is not None and trainer.state.fn == TrainerFn.FITTING):
            return
        values = self._round(trainer, pl_module)
        tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}
        pl_module.log_dict(tensors, sync_dist=True)  # of equal numbers, but for the seconds

    def _prepare(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make this process's questions, and see that the others can be made and put."""
        assert isinstance(pl_module, LongContextLM)
        if sequence_group(trainer.strategy) is not None:
            raise ValueError(
                "LongContextTasks puts whole questions to each process, and here several share the tokens of a row:"
                " remove the callback, and run `longce evaluate` on the exported model."
            )
        self._prompter = Prompter(self._find_tokenizer(trainer), **self._prompting)
        pl_module.backbone.check_length(max(key.length for key in self.keys))
        with isolate_rng():  # a task of the user's own may draw from anything
            first = make_questions(first_of_each(self.keys), self.tasks, self._prompter, self.seed)
            warn_of_unknown_tokens(first, self._prompter)
            own = self.keys[trainer.global_rank :: trainer.world_size]
            self._questions = make_questions(own, self.tasks, self._prompter, self.seed)

    def _find_tokenizer(self, trainer: Trainer) -> Any:
        tokenizer = self.tokenizer or getattr(trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError("The data module has no tokenizer: name one by `tokenizer` of LongContextTasks.")
        return tokenizer

    def _round(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Put all questions, draw what there is to see, and give the numbers to be logged."""
        assert isinstance(pl_module, LongContextLM)
        assert self._prompter is not None
        pl_module.stop_clock()
        started = time.perf_counter()
        with isolate_rng(), trainer.precision_plugin.forward_context():
            results = put_questions(pl_module.backbone, self._prompter, self._questions, self.mode)
        results = self._gathered(results)
        if pl_module.device.type == "cuda":
            torch.cuda.empty_cache()  # training would not find the caches' memory in pieces that it can use
        summary = summarise(results)
        self._draw(trainer, summary, results)
        values = {f"tasks/{name}": value for name, value in summary.logged().items()}
        return values | self._cost(time.perf_counter() - started)

    def _cost(self, seconds: float) -> dict[str, float]:
        self._seconds += seconds
        if self._began is None:
            return {"tasks/seconds": seconds}
        return {"tasks/seconds": seconds, "tasks/time_share": self._seconds / (time.perf_counter() - self._began)}

    @staticmethod
    def _log_directly(trainer: Trainer, values: dict[str, float]) -> None:
        """At this very step, whatever `log_every_n_steps` says."""
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    @staticmethod
    def _draw(trainer: Trainer, summary: Summary, results: Sequence[TaskResult]) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not loggers or not trainer.is_global_zero:
            return
        step = trainer.global_step
        pictures = {name: as_pixels(figure) for name, figure in figures(summary).items()}
        for logger in loggers:
            for name, pixels in pictures.items():
                logger.experiment.add_image(f"tasks/{name}", pixels, step, dataformats="HWC")
            logger.experiment.add_text("tasks/answers", as_markdown_table(answer_table(results)), step)

    def _gathered(self, results: list[TaskResult]) -> list[TaskResult]:
        """The results of all processes, in the order in which a single one would have them."""
        parts = [results]
        if dist.is_available() and dist.is_initialized():
            parts *= dist.get_world_size()
            dist.all_gather_object(parts, results)
        by_key = {result.key: result for part in parts for result in part}
        return [by_key[key] for key in self.keys]
