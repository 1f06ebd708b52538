"""Checkpoints that a run can go on from exactly."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class StepCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint that saves during an epoch only when an optimizer step is complete.

    A checkpoint holds no gradients. Lightning's own saves a resumed run once more after its first batch, and after a
    validation wherever that came; with ``accumulate_grad_batches`` either is in the middle of a step: a run that goes
    on from there has lost the batches before. After a validation in the middle of a step this one saves when the step
    is complete, with what the validation found. After an exception it still saves wherever training was
    (``save_on_exception``): then the first step of the run that goes on is made of the batches that were left.
    """

    _due = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _between_steps(trainer):
            return
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._due:
            self._due = False
            super().on_validation_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due = not _between_steps(trainer)
        if not self._due:
            super().on_validation_end(trainer, pl_module)


def _between_steps(trainer: Trainer) -> bool:
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
