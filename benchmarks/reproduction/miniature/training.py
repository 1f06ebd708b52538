"""Train one run of the reproduction into a folder, which is either complete or does not exist."""

import hashlib
import json
import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from transformers.utils.logging import disable_progress_bar, enable_progress_bar
from typing_extensions import override

from benchmarks.reproduction.miniature.measure import Examination, Tokens
from benchmarks.reproduction.miniature.settings import Miniature, Training, Windows
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.objectives import CrossEntropy, LongCE, Objective
from lightning_modules.utilities.files import atomic_folder

FORMAT = 1
"""Part of every run's address: raise it with any change to what a run does or stores."""

ObjectiveName = Literal["CE", "LongCE"]


@dataclass(frozen=True)
class Run:
    """A model to train and measure.

    Attributes:
        name: Unique, with a slash between groups, such as ``seed0/base``.
        seed: Seed of the data, and of random weights.
        training: Training settings; None for a model that is only measured.
        rope_theta: RoPE base.
        parent: Run whose last weights it starts from; None for random weights.
        objective: Objective to minimize.
        windows: Short contexts of LongCE.
        measured_at: Steps before the last one at which questions are asked.
        reported_at: Step before the last one at which everything is measured.
        rows: Number of sequences in the data, if not the number trained on.
    """

    name: str
    seed: int
    training: Training | None
    rope_theta: float
    parent: "Run | None" = None
    objective: ObjectiveName = "CE"
    windows: Windows | None = None
    measured_at: tuple[int, ...] = ()
    reported_at: int | None = None
    rows: int | None = None


class Report(TypedDict):
    """Further measurements of a model.

    Attributes:
        short_right: Fraction of right answers in the shortest documents, by depth.
        short_perplexity: Perplexity of the shortest documents.
        loss_by_context: Loss in nats for each context length.
    """

    short_right: list[float]
    short_perplexity: float
    loss_by_context: list[float]


@dataclass(frozen=True)
class Measurement:
    """Measurements of a model.

    Attributes:
        step: Optimizer steps taken.
        cpu_seconds: CPU time of these steps, without measuring.
        right: Fraction of right answers in the longest documents, by depth.
        report: Further measurements, at the last step and the requested one.
    """

    step: int
    cpu_seconds: float
    right: list[float]
    report: Report | None = None

    @property
    def accuracy(self) -> float:
        """Fraction of right answers at all depths."""
        return sum(self.right) / len(self.right)


@dataclass
class Laboratory:
    """Settings, text, questions and results folder, shared by all runs.

    Attributes:
        settings: The declared experiments.
        folder: Folder of the runs.
    """

    settings: Miniature
    folder: Path

    @cached_property
    def corpus(self) -> Any:
        """The text."""
        return self.settings.load_corpus()

    @cached_property
    def examination(self) -> Examination:
        """Documents and questions."""
        return Examination(self.corpus, self.settings)

    @cached_property
    def _address(self) -> str:
        settings = asdict(self.settings)
        shared = {name: settings[name] for name in ("model", "evaluation", "context_length", "stride", "gamma")}
        return repr((FORMAT, self.corpus.fingerprint(), shared, torch.__version__))

    def path(self, run: Run) -> Path:
        """Return the folder of the run; its name has a hash of everything that its content depends on."""
        digest = hashlib.sha256(f"{self._address} {asdict(run)}".encode()).hexdigest()
        return self.folder / f"{run.name.replace('/', '-')}-{digest[:10]}"

    def is_done(self, run: Run) -> bool:
        """Return whether the run is complete."""
        return (self.path(run) / "run.json").is_file()

    def measurements(self, run: Run) -> list[Measurement]:
        """Read the measurements of a complete run, by step."""
        stored = json.loads((self.path(run) / "run.json").read_text())
        return [Measurement(**entry) for entry in stored["measurements"]]

    def tokens(self, run: Run, step: int | None = None) -> Tokens:
        """Read the likelihoods of every token of the documents at a step with a report, by default the last."""
        return Tokens.load(self.path(run) / _tokens_file(self.measurements(run)[-1].step if step is None else step))

    def make(self, run: Run) -> None:
        """Train and measure; an interrupted run starts again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        with atomic_folder(self.path(run)) as folder, _quiet():
            seed_everything(run.seed, verbose=False)
            found = _Found(self.examination, folder)
            module = self._module(run)
            if run.training is None:
                module.configure_model()
                found.add(module.backbone, 0, 0.0, reports=True)
            else:
                self._train(run, run.training, module, found)
            module.backbone.base_model.save_pretrained(folder / "model")
            entry = {
                "name": run.name,
                "settings": asdict(run),
                "cpu_seconds": time.process_time() - started,
                "measurements": [asdict(measurement) for measurement in found.measurements],
            }
            (folder / "run.json").write_text(json.dumps(entry, indent=1, default=str))

    def _module(self, run: Run) -> LongContextLM:
        settings = self.settings
        longest = settings.fine_tuning.sequence_length
        model = {"max_position_embeddings": longest, "rope_parameters": {"rope_theta": run.rope_theta}}
        if run.parent is None:
            tokenizer = self.corpus.tokenizer()
            words = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": None}
            rope = {"rope_parameters": {"rope_type": "default", "rope_theta": run.rope_theta}}
            model = {**settings.model, **words, "max_position_embeddings": longest, **rope}
        training = run.training
        windows = run.windows or Windows(settings.context_length, settings.stride)
        objective: Objective = CrossEntropy() if run.objective == "CE" else LongCE(settings.gamma)
        return LongContextLM(
            None if run.parent is None else str(self.path(run.parent) / "model"),
            objective,
            context_length=windows.context_length,
            stride=windows.stride,
            model_config=model,
            optimizer=partial(torch.optim.AdamW, lr=0.0 if training is None else training.lr, **ADAMW),
            lr_scheduler=partial(_warm_up, steps=1 if training is None else training.warmup),
        )

    def _train(self, run: Run, training: Training, module: LongContextLM, found: "_Found") -> None:
        data = self.corpus.training_data(
            run.rows or training.steps * training.batch_size,
            sequence_length=training.sequence_length,
            document_rows=training.document_rows,
            slot=training.slot,
            second_dialect=training.second_dialect,
            batch_size=training.batch_size,
            seed=run.seed,
            cache_dir=str(self.folder / "cache"),
        )
        Trainer(
            accelerator="cpu",
            max_steps=training.steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            use_distributed_sampler=False,
            default_root_dir=self.folder,
            callbacks=[_Watch(run, training, found)],
        ).fit(module, data)


ADAMW: dict[str, Any] = {"betas": (0.9, 0.98), "weight_decay": 0.01}


class _Found:
    """Measurements of one run."""

    def __init__(self, examination: Examination, folder: Path) -> None:
        self.examination, self.folder = examination, folder
        self.measurements: list[Measurement] = []

    def add(self, backbone: Backbone, step: int, cpu_seconds: float, *, reports: bool) -> None:
        ask = self.examination
        right = ask.right_answers(backbone, ask.settings.fine_tuning.sequence_length)
        report: Report | None = None
        if reports:
            ask.tokens(backbone).save(self.folder / _tokens_file(step))
            report = {
                "short_right": ask.right_answers(backbone, ask.short_length),
                "short_perplexity": ask.short_perplexity(backbone),
                "loss_by_context": ask.loss_by_context(backbone),
            }
        self.measurements.append(Measurement(step, cpu_seconds, right, report))


def _tokens_file(step: int) -> str:
    return f"tokens-{step}.safetensors"


class _Watch(Callback):
    """Measures at the declared steps, stops when enough is recalled, and counts the CPU seconds of training alone."""

    def __init__(self, run: Run, training: Training, found: _Found) -> None:
        self.run, self.training, self.found = run, training, found
        self.cpu_seconds = 0.0
        self._started = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.process_time()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.cpu_seconds += time.process_time() - self._started
        step = trainer.global_step
        backbone: Any = pl_module.backbone
        if self._recalls_enough(step, backbone):
            trainer.should_stop = True
        last = step == self.training.steps or trainer.should_stop
        reports = last or step == self.run.reported_at
        if reports or step in self.run.measured_at:
            self.found.add(backbone, step, self.cpu_seconds, reports=reports)
        self._started = time.process_time()

    def _recalls_enough(self, step: int, backbone: Backbone) -> bool:
        enough = self.training.stop_at
        if enough is None or step % self.training.check_every:
            return False
        shares = self.found.examination.right_answers(backbone, self.training.sequence_length)
        return sum(shares) / len(shares) >= enough


def _warm_up(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    if steps == 1:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning, whose messages dozens of runs in one process would repeat."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(action="ignore"):
        disable_progress_bar()
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            enable_progress_bar()
            logging.disable(disabled)
