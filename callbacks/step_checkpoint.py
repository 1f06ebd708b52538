"""Checkpoints that a run can go on from exactly."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override


class StepCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint that saves after training batches only when they complete an optimizer step.

    A checkpoint holds no gradients. Lightning's own saves a resumed run once more after its first batch, which with
    ``accumulate_grad_batches`` is in the middle of a step: a run that goes on from there has lost that batch. After an
    exception it still saves wherever training was (``save_on_exception``): then the first step of the run that goes on
    is made of the batches that were left.
    """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
