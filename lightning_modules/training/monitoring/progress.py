"""Progress of training and evaluation, in optimizer steps and documents."""

import math
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm
from typing_extensions import override

from lightning_modules.models.progress import show_batch
from lightning_modules.utilities.progress import progress_bar


class StepProgress(ProgressBar):
    """Shows optimizer steps, not batches, with the loss, LongPPL, speed and the time left; in log files as lines.

    Lightning's bars count batches of an epoch: with accumulated batches or after a resume, their total is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: tqdm | None = None
        self._documents: tqdm | None = None
        self._evaluated = ""  # result of the last evaluation
        self._first: tuple[int, float] | None = None  # step and time of the first batch of this process
        self._batch = ExitStack()  # has the bar of the current batch

    @override
    def disable(self) -> None:
        """Do nothing: `progress_bar` shows nothing in other processes."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = None
        if trainer.is_global_zero:
            self._steps = progress_bar("", unit="step", initial=trainer.global_step)
            self._steps.bar_format = "{desc}"
            self._describe_step(trainer)
            self._steps.refresh()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._first is None:  # not earlier: the evaluation before the first step takes long
            self._first = trainer.global_step, time.monotonic()
        self._batch.enter_context(watch_batch(trainer, f"step {trainer.global_step:,}"))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batch.close()
        if self._steps is None:
            return
        passed = trainer.global_step - self._steps.n
        if passed:
            self._describe_step(trainer)
            self._steps.update(passed)

    def _describe_step(self, trainer: Trainer) -> None:
        """Set the line to ``step 37/200  18%  loss 2.41  LongPPL 3.1  41.2k tok/s  MFU 43%  3.1 h left``."""
        assert self._steps is not None
        step = trainer.global_step
        total = _count_steps(trainer)
        values = trainer.callback_metrics
        parts = [f"step {step:,}"]
        if total is not None:
            parts = [f"step {step:,}/{total:,}  {step / max(total, 1):.0%}"]
        if "train/loss" in values:
            parts.append(f"loss {values['train/loss']:.4g}")
        parts.append(self._evaluated)
        if "train/tokens_per_second" in values:
            parts.append(f"{tqdm.format_sizeof(float(values['train/tokens_per_second']))} tok/s")
        if "train/mfu" in values:
            parts.append(f"MFU {values['train/mfu']:.0%}")
        if self._first is not None and total is not None and self._first[0] < step < total:
            first, started = self._first
            # Including evaluations and checkpoints since the first batch.
            parts.append(_describe_rest((time.monotonic() - started) / (step - first) * (total - step)))
        self._steps.set_description_str("  ".join(filter(None, parts))[: self._steps.ncols], refresh=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
            total = sum(batches)
            known = int(total) if math.isfinite(total) else None
            leave = self._steps is None
            self._documents = progress_bar("evaluation", unit="batch", total=known, leave=leave, scaled=False)

    @override
    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batch.enter_context(watch_batch(trainer, "this batch"))

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batch.close()
        if self._documents is not None:
            self._documents.update()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._documents is not None:
            self._documents.close()
            self._documents = None
            self._evaluated = _describe_evaluation(trainer)
            stage = "test" if trainer.testing else "val"
            for line in describe_cells(trainer.callback_metrics, stage):
                rank_zero_info(line)
            if self._steps is not None:
                self._describe_step(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = sum(trainer.num_predict_batches)
        if math.isfinite(total):
            self._documents = progress_bar("prediction", unit="batch", total=int(total), scaled=False)

    on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_predict_end = on_validation_end
    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_validation_end

    def _close(self) -> None:
        self._batch.close()
        if self._documents is not None:
            self._documents.close()
        if self._steps is not None:
            self._steps.refresh()  # the last step, even in a log file
            self._steps.close()
        self._documents = self._steps = None


def watch_batch(trainer: Trainer, name: str) -> AbstractContextManager[None]:
    """Show the tokens of a batch's forward passes after half a minute: on a CPU, a batch may take longer."""
    is_shown = trainer.is_global_zero and trainer.strategy.root_device.type == "cpu"
    return show_batch(name) if is_shown else nullcontext()


def describe_cells(metrics: Mapping[str, Any], stage: str) -> list[str]:
    """Return an aligned line for each set, evaluator and thresholds: LongPPL, key tokens, and the set's perplexity.

    Example:
        >>> values = {"val/books/longppl": 5.3, "val/books/key_tokens": 240, "val/books/perplexity": 24.8}
        >>> describe_cells(values | {"val/notes/longppl": math.nan, "val/notes/key_tokens": 0}, "val")
        ['val/books  LongPPL   5.3  over 240 key tokens  perplexity 24.8', 'val/notes  no key tokens']
    """
    cells = [name.removesuffix("/longppl") for name in metrics if re.fullmatch(rf"{stage}/(.+/)?longppl", name)]
    width = max(map(len, cells), default=0)
    lines = []
    for cell in cells:
        key_tokens = int(metrics.get(f"{cell}/key_tokens", 0))
        numbers = "no key tokens"
        if key_tokens:
            numbers = f"LongPPL {metrics[f'{cell}/longppl']:>5.4g}  over {key_tokens:,} key tokens"
            numbers += _describe_perplexity(metrics, cell)
        lines.append(f"{cell:<{width}}  {numbers}")
    return lines


def _describe_perplexity(metrics: Mapping[str, Any], cell: str) -> str:
    """Return the perplexity of a cell's set, which evaluators and thresholds do not change; empty if it is unknown."""
    place = cell
    while place:
        if f"{place}/perplexity" in metrics:
            return f"  perplexity {metrics[f'{place}/perplexity']:.4g}"
        place, _, _ = place.rpartition("/")
    return ""


def _describe_evaluation(trainer: Trainer) -> str:
    """Return the value of the metric that a checkpoint callback monitors, or else the first LongPPL or perplexity.

    A metric that is NaN, because its set has no key tokens, is the last choice.
    """
    metrics = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    monitored: list[Any] = [getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks]
    ranked = sorted(metrics, key=lambda name: (not name.endswith("/longppl"), not name.endswith("/perplexity")))
    known = [name for name in [*monitored, *ranked] if name in metrics]
    if not known:
        return ""
    chosen = min(known, key=lambda name: metrics[name].isnan())
    _, *place, kind = chosen.split("/")
    label = "LongPPL" if kind == "longppl" else kind
    described = f"{label} {metrics[chosen]:.4g}"
    if place:
        described += f" ({'/'.join(place)})"
    return described


def _describe_rest(seconds: float) -> str:
    for unit, size, limit, spec in (("s", 1, 90, ".0f"), ("min", 60, 90, ".0f"), ("h", 3600, 48, ".1f")):
        if seconds < limit * size:
            return f"{seconds / size:{spec}} {unit} left"
    return f"{seconds / 86400:.1f} days left"


def _count_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of a whole run, or None if they are not known."""
    # Not `estimated_stepping_batches`, which loads the data before a loader's state is restored.
    per_epoch = math.inf
    if math.isfinite(trainer.num_training_batches):
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    steps = math.inf
    if trainer.max_steps != -1:
        steps = trainer.max_steps
    if trainer.max_epochs is not None and trainer.max_epochs != -1:
        steps = min(steps, per_epoch * trainer.max_epochs)
    return int(steps) if math.isfinite(steps) else None
