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
from tests.support.fault_runs import BASE, ROOT, Run, new_run, prepare

FIT = ["fit", "-c", BASE, "-c", "config.yaml", "--ckpt_path", "last"]


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
def test_two_processes_train_one_model_and_log_once(tmp_path):
    run = Run(tmp_path, ranks=2)
    words = ["fit", "-c", BASE, "-c", str(ROOT / "configs" / "debug.yaml"), "--trainer.devices", "2"]
    words += ["--trainer.max_steps", "1", "--trainer.strategy", "ddp"]
    assert finish(start(run.folder, *words)) == 0, run.log()
    (config,) = run.folder.glob("runs/longce/*/config.yaml")
    events = EventAccumulator(str(config.parent)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun")
    prepare(folder)
    return folder


@pytest.mark.slow
def test_a_killed_rank_is_restarted_with_equal_losses_and_a_signal_saves(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    # A signal during an evaluation would find its step saved already, and print another answer.
    config["trainer"]["limit_val_batches"] = 0
    runs = [new_run(folder / "undisturbed", config, ranks=2, workers=1)]
    (recorder,) = (each for each in config["trainer"]["callbacks"] if "Recorder" in each["class_path"])
    recorder["init_args"]["pause"] = 0.1
    runs.append(new_run(folder / "killed", config, ranks=2, workers=1))
    assert finish(start(runs[0].folder, *FIT)) == 0
    assert runs[0].log().count("[rank: 0] Seed set to") == 1, "Lightning's messages appear once"

    launcher = start(runs[1].folder, *FIT, restarts=1)
    wait_for(lambda: len(runs[1].records()) >= 6, launcher)
    victim = ranks(launcher)[1]
    victim.send_signal(signal.SIGKILL)
    wait_for(lambda: len(ranks(launcher)) == 2 and victim not in ranks(launcher), launcher)
    before = len(runs[1].records())
    wait_for(lambda: len(runs[1].records()) > before + 2, launcher)
    launcher.send_signal(signal.SIGTERM)  # torchrun passes it on to the group of each process, without loader workers
    finish(launcher)
    assert "stopping after this optimizer step" in runs[1].log()
    assert "Saved step" in runs[1].log()

    assert finish(start(runs[1].folder, *FIT)) == 0, runs[1].log()
    assert not runs[1].differences(runs[0])


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_names_the_step(folder):
    run = new_run(folder / "interrupted", yaml.safe_load((folder / "config.yaml").read_text()), ranks=2)
    launcher = start(run.folder, *FIT)
    wait_for(lambda: len(run.records()) >= 2, launcher)
    started = ranks(launcher)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher) == 1
    assert not psutil.wait_procs(started, timeout=10)[1]
    assert "Stopped at step" in run.log()
