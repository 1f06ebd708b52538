"""Progress of training and evaluation, in optimizer steps and documents."""

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm
from typing_extensions import override

from lightning_modules.utilities.progress import progress_bar

_SHOWN = {"train/loss": "loss", "val/longppl": "LongPPL", "train/tokens_per_second": "tokens/s"}
"""Values after the bar, by their names in logs."""


class StepProgress(ProgressBar):
    """Shows optimizer steps, not batches, with the loss, LongPPL, speed and the time left; in log files as lines.

    Lightning's bars count batches of an epoch: with accumulated batches or after a resume, their total is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: tqdm | None = None
        self._documents: tqdm | None = None

    @override
    def disable(self) -> None:
        """Do nothing: `progress_bar` shows nothing in other processes."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total, passed = _count_steps(trainer), trainer.global_step
        self._steps = progress_bar("step", unit="step", total=total, initial=passed, scaled=False)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._steps is not None and (passed := trainer.global_step - self._steps.n):
            values = trainer.callback_metrics
            numbers = {label: float(values[name]) for name, label in _SHOWN.items() if name in values}
            shown = {label: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for label, value in numbers.items()}
            self._steps.set_postfix(shown, refresh=False)
            self._steps.update(passed)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            total = sum(trainer.num_test_batches if trainer.testing else trainer.num_val_batches)
            known, leave = int(total) if math.isfinite(total) else None, self._steps is None
            self._documents = progress_bar("evaluation", unit="batch", total=known, leave=leave, scaled=False)

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._documents is not None:
            self._documents.update()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._documents is not None:
            self._documents.close()
            self._documents = None

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        total = sum(trainer.num_predict_batches)
        if math.isfinite(total):  # that of a corpus is not known, and `DocumentScoresWriter` has its own bar
            self._documents = progress_bar("prediction", unit="batch", total=int(total), scaled=False)

    on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_predict_end = on_validation_end
    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_validation_end

    def _close(self) -> None:
        for bar in (self._documents, self._steps):
            if bar is not None:
                bar.close()
        self._documents = self._steps = None


def _count_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of a whole run, or None if they are not known."""
    # Not `estimated_stepping_batches`, which loads the data before a loader's state is restored.
    per_epoch = math.inf
    if math.isfinite(trainer.num_training_batches):
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    limits = [math.inf if trainer.max_steps == -1 else trainer.max_steps, per_epoch * epochs]
    return int(min(limits)) if math.isfinite(min(limits)) else None
