"""`torchrun .. longce fit`: two processes that train one model, stop on a signal, and are restarted after a crash."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules.packing.loader import FORK_IS_SAFE
from tests.support.fault_runs import BASE, ROOT, new_run, prepare
from tests.support.forks import call

FIT = ["fit", "-c", BASE, "-c", "config.yaml"]


def start(folder, *words, restarts=0):
    """Start a command in two processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LONGCE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [
        "--max_restarts",
        str(restarts),
        "--shutdown_timeout",
        "60",
        "-m",
        "longce.cli.main",
    ]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen([*command, *words], cwd=folder, env=environment, stdout=log, stderr=log)


def report_hang(seconds):
    """Fail, or expect it: Python before 3.11.10 may hang when a process starts its loader worker on a busy machine.

    See https://github.com/python/cpython/issues/112275.
    """
    (pytest.xfail if sys.version_info < FORK_IS_SAFE else pytest.fail)(f"the run hangs after {seconds} s")


def finish(launcher, seconds=120):
    """Return the exit status."""
    try:
        return launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        processes = [*psutil.Process(launcher.pid).children(recursive=True), launcher]
        for process in processes:
            process.kill()
        report_hang(seconds)


def wait_for(moment, launcher, seconds=120):
    deadline = time.monotonic() + seconds
    while not moment():
        assert launcher.poll() is None, "the run has ended"
        if time.monotonic() > deadline:
            report_hang(seconds)
        time.sleep(0.05)


def ranks(launcher):
    """Return the running processes of a launcher, rank 0 first."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            found[child.environ().get("RANK", "")] = child
    return [found[rank] for rank in sorted(found) if rank]


@pytest.mark.slow
def test_processes_that_are_interrupted_or_killed_resume_with_equal_losses(tmp_path):
    prepare(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["trainer"]["max_steps"] = 24
    # A signal during an evaluation would find its step saved already, and print another answer.
    config["trainer"]["limit_val_batches"] = 0
    undisturbed = new_run(tmp_path / "undisturbed", config, ranks=2, workers=1)
    del config["trainer"]["logger"]  # for that of `base.yaml`, which chooses the name of the folder
    (recorder,) = (each for each in config["trainer"]["callbacks"] if "Recorder" in each["class_path"])
    recorder["init_args"]["pause"] = 0.1
    disturbed = new_run(tmp_path / "disturbed", config, ranks=2, workers=1)

    # 1. Two processes train one model, and log once, to one folder. Ctrl-C ends both and names the step.
    launcher = start(disturbed.folder, *FIT)
    wait_for(lambda: len(disturbed.records()) >= 4, launcher)
    started = ranks(launcher)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher) == 1
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert "Stopped at step" in disturbed.log()
    assert disturbed.log().count("[rank: 0] Seed set to") == 1, "Lightning's messages appear once"
    (saved_config,) = disturbed.folder.glob("runs/longce/*/config.yaml")
    events = EventAccumulator(str(saved_config.parent)).Reload()
    logged_steps = [event.step for event in events.Scalars("train/loss")]
    assert logged_steps
    assert logged_steps == sorted(set(logged_steps))

    # 2. A killed rank is restarted, and a signal saves.
    resume = [*FIT, "--trainer.logger.init_args.version", saved_config.parent.name, "--ckpt_path", "last"]
    launcher = start(disturbed.folder, *resume, restarts=1)
    before = len(disturbed.records())
    wait_for(lambda: len(disturbed.records()) >= before + 4, launcher)
    victim = ranks(launcher)[1]
    victim.send_signal(signal.SIGKILL)
    wait_for(lambda: len(ranks(launcher)) == 2 and victim not in ranks(launcher), launcher)
    before = len(disturbed.records())
    wait_for(lambda: len(disturbed.records()) > before + 2, launcher)
    launcher.send_signal(signal.SIGTERM)  # torchrun passes it on to the group of each process, without loader workers
    finish(launcher)
    assert "stopping after this optimizer step" in disturbed.log()
    assert "Saved step" in disturbed.log()

    # 3. The last start trains to the end, like a run that nothing disturbs.
    assert call(undisturbed.train) == [0, 0], undisturbed.log()
    assert call(disturbed.train, *resume[len(FIT) : -2]) == [0, 0], disturbed.log()
    assert not disturbed.differences(undisturbed)
