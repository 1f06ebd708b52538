"""Repeat an evaluation that was interrupted when its training resumes."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_modules.training.checkpoints.io import RUN_ID
from lightning_modules.training.preemption import StopSignal, between_steps
from lightning_modules.utilities.files import write_atomically

EVALUATED_FILE = "evaluated.json"
"""File in a folder of checkpoints with the run and the step of its last complete evaluation."""


class DueEvaluation(Callback):
    """Stores in checkpoints whether the evaluation at their step is due: it was not yet complete.

    A run that is interrupted before or in an evaluation resumes with it (`ResumingTrainer`), unless `EVALUATED_FILE`
    next to the checkpoint names it as complete. After the last result is computed, a signal to ``stop`` waits until it
    is logged. Results that decide something are computed again in any case, because the checkpoint lacks them.
    """

    def __init__(self, stop: StopSignal) -> None:
        self._signal = stop
        self._is_due = False
        self._run: str | None = None  # of the checkpoint

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if between_steps(trainer):
            loop = trainer.fit_loop
            assert loop._data_fetcher is not None
            self._is_due = trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signal.is_interrupting = False

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not between_steps(trainer):
            return
        self._is_due = False
        text = json.dumps({"run": getattr(pl_module, "run_id", None), "step": trainer.global_step})
        for callback in trainer.checkpoint_callbacks if trainer.is_global_zero else ():
            folder = getattr(callback, "dirpath", None)
            if folder is not None and Path(folder).is_dir():
                write_atomically(Path(folder, EVALUATED_FILE), text.encode())

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._run = checkpoint.get(RUN_ID)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"is_due": self._is_due}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_due = state_dict["is_due"]

    def repeat(self, trainer: Trainer) -> None:
        """Run the evaluation if it is due, with the loops and random states of the checkpoint unchanged."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        is_due = self._is_due and loop.restarting and trainer.enable_validation
        is_due = is_due and (_decides(trainer) or not self._was_complete(trainer))
        if not trainer.strategy.broadcast(is_due):
            return
        state = loop.state_dict()
        loop.restarting, trainer.validating = False, True
        with isolate_rng():
            loop.run()
        loop.load_state_dict(state)
        trainer.training = True

    def _was_complete(self, trainer: Trainer) -> bool:
        """Return whether the evaluation was complete, but only after its checkpoint was saved."""
        evaluated = Path(str(trainer.ckpt_path)).parent / EVALUATED_FILE
        if not evaluated.exists():
            return False
        return bool(json.loads(evaluated.read_bytes()) == {"run": self._run, "step": trainer.global_step})


def _decides(trainer: Trainer) -> bool:
    """Return whether results of evaluations change the learning rate, end the training or choose checkpoints."""
    changes_rate = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
    monitors = {getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks}
    return changes_rate or bool(trainer.early_stopping_callbacks) or not monitors <= {None, "step"}


class ResumingTrainer(Trainer):
    """Lightning's Trainer, which resumes a training with the evaluation that is due.

    Lightning has no hook for it: after the last step, a resumed training runs none.
    """

    @override
    def _run_stage(self) -> Any:
        callbacks: list[Any] = self.callbacks  # type: ignore[attr-defined]
        for callback in callbacks if self.training else ():
            if isinstance(callback, DueEvaluation):
                callback.repeat(self)
        return super()._run_stage()
