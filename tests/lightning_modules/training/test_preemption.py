import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from callbacks import StepCheckpoint
from lightning_modules.training import preemption
from lightning_modules.training.preemption import Preemption
from tests.support import forks
from tests.support.trainers import OneWeight, quiet_trainer

ACCUMULATE = 3


class Line(OneWeight):
    """Signals its own process in some batches."""

    def __init__(self, *batches, number=signal.SIGTERM):
        super().__init__()
        self.batches, self.number = batches, number

    def training_step(self, batch, batch_idx):
        if batch_idx in self.batches:
            os.kill(os.getpid(), self.number)
        return (self.weight - batch.float().mean()) ** 2


def fit(folder, module):
    callbacks = [Preemption(), StepCheckpoint(folder, "{step}", every_n_train_steps=100, save_on_exception=True)]
    settings = {"max_epochs": 1, "accumulate_grad_batches": ACCUMULATE, "enable_checkpointing": True}
    trainer = quiet_trainer(folder, *callbacks, **settings)
    trainer.fit(module, DataLoader(range(20)))
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_training_ends_with_the_step_saved_and_status_0(tmp_path, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException) as stopped:
        fit(tmp_path, Line(4, 5))
    assert not stopped.value.code
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
    loops = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert loops["epoch_loop.batch_progress"]["current"]["ready"] == 2 * ACCUMULATE
    assert capfd.readouterr().err.count("SIGTERM: stopping after this optimizer step") == 1
    assert signal.getsignal(signal.SIGTERM) == handler


def stop_twice():
    preemption.SIGNAL_ECHO_SECONDS = 0.0
    fit(Path(), Line(4, 5))


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path):
    with contextlib.chdir(tmp_path):
        process = forks.start(stop_twice, out=tmp_path / "printed")
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert list(tmp_path.glob("*.ckpt")) == []


@pytest.mark.filterwarnings("ignore")
def test_under_slurm_the_announcement_of_the_end_requeues_the_job(tmp_path, monkeypatch, caplog):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for number, expected in ((signal.SIGTERM, False), (signal.SIGUSR1, True)):
        asked = Preemption()
        old = {signal_: signal.getsignal(signal_) for signal_ in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            asked.on_train_start(None, None)
            os.kill(os.getpid(), number)
        finally:
            for signal_, handler in old.items():
                signal.signal(signal_, handler)
        asked.requeue(would_resume=True)
        assert (tmp_path / "called").exists() == expected
    assert (tmp_path / "called").read_text() == "requeue 77\n"
    asked.requeue(would_resume=False)  # it would begin again for ever
    assert "use `--ckpt_path last`" in caplog.text
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    asked.requeue(would_resume=True)
    assert (tmp_path / "called").read_text() == "requeue 77\nrequeue 77_3\n"
