"""Preemption: on a cluster's signal, all processes stop together after an optimizer step, with a checkpoint."""

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

SIGNAL_ECHO_SECONDS = 5.0
"""Time in which a second signal is ignored, because launchers forward signals that processes have already received."""

_log = logging.getLogger(__name__)


class StopSignal:
    """The first signal to stop, to which ``answer`` is printed; a second one ends the process and its children."""

    def __init__(self, answer: str) -> None:
        self.received: int | None = None
        self._answer, self._since = answer, 0.0

    def listen(self, trainer: Trainer, *numbers: int) -> None:
        """Handle these signals from now on; the trainer restores the previous handlers."""
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in numbers:
                signal.signal(number, functools.partial(self._receive, trainer))

    def _receive(self, trainer: Trainer, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = number, time.monotonic()
            # Not with `logging`, which may be what the signal interrupted.
            os.write(2, f"longce: {signal.Signals(number).name}: {self._answer}.\n".encode())
        elif time.monotonic() - self._since > SIGNAL_ECHO_SECONDS:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)
            os._exit(128 + number)


class Preemption(Callback):
    """Stops training after the current optimizer step on SIGTERM, and on SIGUSR1 under SLURM.

    After each optimizer step, all processes agree on whether one of them got a signal, and raise `SIGTERMException`
    together. A checkpoint callback with ``save_on_exception`` then saves, and the process exits with 0. A second signal
    ends the process at once. During an evaluation, a single process stops after the current batch; several processes
    stop after the next training step.

    This replaces Lightning's handlers, which save or communicate at any point of the computation.
    """

    def __init__(self) -> None:
        self._signal = StopSignal("stopping after this optimizer step")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signal.listen(trainer, signal.SIGTERM, *([] if _slurm_job() is None else [signal.SIGUSR1]))

    on_sanity_check_start = on_train_start

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        got_signal = self._signal.received is not None
        if between_steps(trainer) and trainer.strategy.reduce_boolean_decision(got_signal, all=False):
            raise SIGTERMException

    @override
    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        # Several processes may have different numbers of batches, so they could not agree here.
        if self._signal.received is not None and trainer.world_size == 1:
            raise SIGTERMException

    def requeue(self, *, would_resume: bool) -> None:
        """Requeue a SLURM job that runs out of time, if it would resume; otherwise it would start over forever."""
        job = _slurm_job()
        if self._signal.received != signal.SIGUSR1 or job is None or shutil.which("scontrol") is None:
            return
        if would_resume:
            subprocess.run(["scontrol", "requeue", job], check=False)  # a failure must not change our exit status
        else:
            _log.warning("The SLURM job is not requeued, because it would start over: use `--ckpt_path last`.")


def _slurm_job() -> str | None:
    """Return the id of this job for ``scontrol``; in a job array, SLURM_JOB_ID may be the id of the array."""
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def between_steps(trainer: Trainer) -> bool:
    """Return whether the last training batch completed an optimizer step."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
