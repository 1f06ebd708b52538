"""Save checkpoints from which a run resumes exactly."""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_modules.training.checkpoints.sharded import CheckpointError
from lightning_modules.training.preemption import between_steps


class StepCheckpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint that saves only between optimizer steps.

    A checkpoint has no gradients. Lightning saves a resumed run after its first batch, and any run after a validation
    at any batch: with ``accumulate_grad_batches``, a run that resumes there loses batches of a step. This callback
    saves only when a step is complete (if a validation runs within a step, at the end of the step, with the
    validation's results), and always after the last step, so that a finished run can later take more steps.

    After an exception (``save_on_exception``) it saves the last complete step, whose weights are still those of the
    model, without the gradients of later batches or an interrupted evaluation. If the newest checkpoints are kept
    (``monitor: step``, ``mode: max``), it replaces the oldest. It does not save before the first step, during the
    optimizer's update, after a checkpoint could not be written, or if one of several processes failed.
    """

    _loops: dict[str, Any] | None = None  # state of the training loops at the last complete step
    _failed = _updating = _due = _has_stepped = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        last = self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)
        if os.path.islink(last):  # the link belongs to the run that this one resumes, and may be replaced
            self.last_model_path = last

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._updating = self._has_stepped = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not between_steps(trainer):
            return
        self._updating = False
        # Several processes save only after a signal, and some loaders communicate to collect their state.
        if trainer.world_size == 1:
            self._note_step(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._due:
            self._due = False
            super().on_validation_end(trainer, pl_module)
        last_batch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        ends = last_batch or trainer.global_step == trainer.max_steps
        if ends and not self._should_skip_saving_checkpoint(trainer):
            self._save_now(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due = not between_steps(trainer)
        if not self._due:
            super().on_validation_end(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        agreed = isinstance(exception, SIGTERMException)
        if (trainer.world_size > 1 and not agreed) or isinstance(exception, CheckpointError):
            return
        # Raised after a step, before this callback runs, or by several processes in an evaluation after a step.
        after_step = self._updating if trainer.training else self._has_stepped and trainer.world_size > 1
        if agreed and after_step:
            self._note_step(trainer)
        if self._loops is None or self._updating or not self._should_save_on_exception(trainer):
            return
        self._failed = True
        if self._keeps_newest and self.save_top_k:
            self._save_now(trainer)  # replaces the oldest, because a run may be stopped many times
            rank_zero_info(f"Saved step {trainer.global_step} in {self.dirpath}.")
        else:
            super().on_exception(trainer, pl_module, exception)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._failed:
            checkpoint["loops"]["fit_loop"] = self._loops

    @property
    def _keeps_newest(self) -> bool:
        return (self.monitor, self.mode) == ("step", "max")

    @override
    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        # Lightning never removes the checkpoint that a run resumed from: each stop would leave one more.
        own = self.dirpath is not None and Path(self.dirpath).absolute() in Path(previous).absolute().parents
        newer = self._keeps_newest and own and previous != current and "://" not in previous
        return newer or super()._should_remove_checkpoint(trainer, previous, current)

    def _save_now(self, trainer: Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _note_step(self, trainer: Trainer) -> None:
        self._loops, self._updating = trainer.fit_loop.state_dict(), False
