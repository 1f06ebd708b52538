"""Preemption: on a cluster's signal, all processes stop together, after an optimizer step or during an evaluation."""

import functools
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_modules.utilities.collectives import fail_together, gathered, patient_group

SIGNAL_ECHO_SECONDS = 5.0
"""Time in which a second signal is ignored, because launchers forward signals that processes have already received."""

_IN_TRAINING = "stopping after this optimizer step"
_IN_EVALUATION = "stopping during the evaluation"
_IN_PREDICTION = "stopping; finished documents are kept"
_STORE_KEY = "longce_stop"

_log = logging.getLogger(__name__)


class StopSignal:
    """The first signal to stop, which prints ``answer``; a second one ends the process and its children.

    If the signal ``is_interrupting``, it raises a `SIGTERMException` immediately, like Ctrl-C.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.answer = _IN_TRAINING
        self.is_interrupting = False
        self._since = 0.0

    def listen(self, trainer: Trainer) -> None:
        """Handle SIGTERM, and SIGUSR1 under SLURM, from now on; the trainer restores the previous handlers."""
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGTERM, *([] if _slurm_job() is None else [signal.SIGUSR1])):
                signal.signal(number, functools.partial(self._receive, trainer))

    def _receive(self, trainer: Trainer, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            self._since = time.monotonic()
            # Not with `logging`, because the signal may have interrupted it.
            os.write(2, f"longce: {signal.Signals(number).name}: {self.answer}.\n".encode())
            self.check()
        elif time.monotonic() - self._since > SIGNAL_ECHO_SECONDS:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)
            os._exit(128 + number)

    def check(self) -> None:
        """Raise a `SIGTERMException` if a signal was received and interrupts."""
        if self.received is not None and self.is_interrupting:
            self.is_interrupting = False  # the process now saves and ends
            raise SIGTERMException

    @contextmanager
    def interrupting(self, value: bool) -> Iterator[None]:
        """Let a signal interrupt the block or, if ``value`` is False, wait until its end."""
        previous = self.answer, self.is_interrupting
        if value:
            self.answer = _IN_EVALUATION
        self.is_interrupting = value
        try:
            self.check()
            yield
        finally:
            self.answer, self.is_interrupting = previous
        self.check()


class Preemption(Callback):
    """Stops training after the current optimizer step on SIGTERM, and on SIGUSR1 under SLURM.

    After each optimizer step, all processes agree on whether one of them got a signal, and raise `SIGTERMException`
    together. A checkpoint callback with ``save_on_exception`` then saves, and the process exits with 0. A second signal
    ends the process at once. `EvaluationStop` stops evaluations.

    This replaces Lightning's handlers, which save or communicate at any point of the computation.
    """

    def __init__(self) -> None:
        self.signal = StopSignal()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.signal.listen(trainer)

    on_sanity_check_start = on_train_start

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        got_signal = self.signal.received is not None
        if between_steps(trainer) and trainer.strategy.reduce_boolean_decision(got_signal, all=False):
            raise SIGTERMException

    def requeue(self, *, would_resume: bool) -> None:
        """Requeue a SLURM job that runs out of time, if it would resume; otherwise it would start over forever."""
        job = _slurm_job()
        if self.signal.received != signal.SIGUSR1 or job is None or shutil.which("scontrol") is None:
            return
        if would_resume:
            subprocess.run(["scontrol", "requeue", job], check=False)  # a failure must not change our exit status
        else:
            _log.warning("The SLURM job is not requeued, because it would start over: use `--ckpt_path last`.")


class EvaluationStop(Callback):
    """Stops validation, test and prediction on the signals of `Preemption`; it must be the first of the callbacks.

    A single process stops immediately. Several processes finish their current batch, and stop together. If a
    validation runs within an optimizer step, several processes stop after the step, whose gradients would be lost.
    """

    def __init__(self, stop: StopSignal) -> None:
        self.signal = stop
        self._patient: dist.ProcessGroup | None = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, _IN_EVALUATION)

    on_test_start = on_validation_start

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patient = patient_group()  # one process may have documents for hours after the others
        self._start(trainer, _IN_PREDICTION)

    def _start(self, trainer: Trainer, answer: str) -> None:
        self.signal.listen(trainer)
        if trainer.received_sigterm and self.signal.received is None:  # by Lightning's handler, a moment ago
            self.signal.received = signal.SIGTERM
        self.signal.answer = answer if _can_stop(trainer) else _IN_TRAINING
        self.signal.is_interrupting = trainer.world_size == 1
        self._stop_together(trainer)

    @override
    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # Processes at their own pace have different numbers of batches, so they agree only when one is stopping.
        if type(trainer.strategy) is not DDPStrategy or self._is_announced(trainer):
            self._stop_together(trainer)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start  # type: ignore[assignment]

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_together(trainer)

    on_test_epoch_end = on_validation_epoch_end

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_together(trainer)
        self._end()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    on_test_end = on_validation_end

    def _end(self) -> None:
        self.signal.answer = _IN_TRAINING
        self.signal.is_interrupting = False

    def _stop_together(self, trainer: Trainer) -> None:
        """Raise a `SIGTERMException` in all processes if one of them got a signal; all of them must call it."""
        self.signal.check()
        if trainer.world_size == 1 or not _can_stop(trainer):
            return
        got_signal = self.signal.received is not None
        if self._patient is None:
            stops = trainer.strategy.reduce_boolean_decision(got_signal, all=False)
        else:
            stops = any(gathered(got_signal, self._patient))
        if stops:
            raise SIGTERMException

    def _is_announced(self, trainer: Trainer) -> bool:
        """Return whether a process got a signal and has announced it here, without waiting for the others."""
        if trainer.world_size == 1 or not _can_stop(trainer):
            return False
        store = dist.distributed_c10d._get_default_store()
        if self.signal.received is not None:
            store.set(_STORE_KEY, "1")
        return bool(store.check([_STORE_KEY]))

    def check(self, trainer: Trainer, *, together: bool) -> None:
        """Raise a `SIGTERMException` if any process got a signal; with ``together``, all of them must call it."""
        if together:
            self._stop_together(trainer)
        elif self._is_announced(trainer):
            raise SIGTERMException


def _find_stop(trainer: Trainer) -> EvaluationStop | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((each for each in callbacks if isinstance(each, EvaluationStop)), None)


@contextmanager
def interruptible(trainer: Trainer, *, communicates: bool = False) -> Iterator[None]:
    """Let a signal to stop interrupt a block that does not train; all processes fail or stop together at its end.

    If the block ``communicates``, several processes cannot stop in it, or wait for each other at its end.
    """
    if communicates and trainer.world_size > 1:
        yield
        return
    stop = _find_stop(trainer)
    with fail_together(), nullcontext() if stop is None else stop.signal.interrupting(_can_stop(trainer)):
        yield


def raise_if_stopping(trainer: Trainer, *, together: bool) -> None:
    """Raise a `SIGTERMException` if any process got a signal to stop; with ``together``, all of them must call it."""
    stop = _find_stop(trainer)
    if stop is not None:
        stop.check(trainer, together=together)


def _can_stop(trainer: Trainer) -> bool:
    """Return whether an evaluation may stop here: several processes save only complete steps."""
    return trainer.world_size == 1 or trainer.state.fn != TrainerFn.FITTING or between_steps(trainer)


def _slurm_job() -> str | None:
    """Return the id of this job for ``scontrol``; in a job array, SLURM_JOB_ID may be the id of the array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def between_steps(trainer: Trainer) -> bool:
    """Return whether the last training batch completed an optimizer step."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
