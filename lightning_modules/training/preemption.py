"""Stopping when a cluster asks for it: with a checkpoint, at a whole optimizer step, in all processes at once."""

import functools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

ECHO = 5.0
"""Seconds within which a second signal is taken for the first: launchers pass on what a process has got already."""

_log = logging.getLogger(__name__)


class Preemption(Callback):
    """On SIGTERM, and on SIGUSR1 under SLURM, lets the optimizer step end, and training with it.

    All processes agree at every optimizer step whether one of them was asked to stop, and raise `SIGTERMException`
    together: a checkpoint callback with ``save_on_exception`` then saves, and the process exits with 0. A second signal
    ends it at once. During an evaluation a single process stops at its next batch, several at the next step.

    Lightning's own handlers, which this replaces, save or talk to other processes in the middle of anything.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._since = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen(trainer)

    on_sanity_check_start = on_train_start

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        asked = self.received is not None
        if between_steps(trainer) and trainer.strategy.reduce_boolean_decision(asked, all=False):
            raise SIGTERMException

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Several processes may have different numbers of batches, and could not ask each other.
        if self.received is not None and trainer.world_size == 1:
            raise SIGTERMException

    def requeue(self, *, goes_on: bool) -> None:
        """Ask SLURM to start a job again whose time ends, if it would resume: one that begins again would never end."""
        job = _slurm_job()
        if self.received != signal.SIGUSR1 or job is None or shutil.which("scontrol") is None:
            return
        if goes_on:
            subprocess.run(["scontrol", "requeue", job], check=False)  # its exit status changes nothing here
        else:
            _log.warning("SLURM is not asked to start the job again, as it would start over: use `--ckpt_path last`.")

    def _listen(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only there may signals be handled
        signals = [signal.SIGTERM, *([] if _slurm_job() is None else [signal.SIGUSR1])]
        for number in signals:
            signal.signal(number, functools.partial(self._receive, trainer))  # the trainer puts the old ones back

    def _receive(self, trainer: Trainer, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = number, time.monotonic()
            # Not by `logging`: it may be what was interrupted.
            os.write(2, f"longce: {signal.Signals(number).name}: stopping after this optimizer step.\n".encode())
        elif time.monotonic() - self._since > ECHO:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)
            os._exit(128 + number)


def _slurm_job() -> str | None:
    """How ``scontrol`` names this job: one of an array may have the id of the whole array."""
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def between_steps(trainer: Trainer) -> bool:
    """Whether the optimizer has stepped after the last training batch."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
