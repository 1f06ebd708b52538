"""`longce launch`: processes that are restarted after a crash, stopped together, and never left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules.packing.loader import FORK_IS_SAFE
from lightning_modules.commands.launch import _is_user_error
from lightning_modules.utilities.orphans import LAUNCHER
from tests.support.fault_runs import BASE, ROOT, Run, new_run, prepare

FIT = ["fit", "-c", BASE, "-c", "config.yaml", "--ckpt_path", "last"]


def start(folder, *words, restarts=0):
    """Launch a command of two processes."""
    command = ["launch", "--nproc_per_node", "2", "--max_restarts", str(restarts), "--", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LONGCE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lightning_modules.commands.cli.main", *command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )


def finish(launcher, run, seconds=120):
    """Return the exit status of a launcher.

    Python before 3.11.10 may hang when a process starts its loader worker, on a busy machine one run in some dozens
    (https://github.com/python/cpython/issues/112275). Such a run is an expected failure there.
    """
    try:
        return launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        launched = psutil.Process(launcher.pid)
        processes = [*launched.children(recursive=True), launched]
        sys.stderr.write(
            "\n".join(f"{process.pid} {process.status()} {process.cmdline()[:5]}" for process in processes)
        )
        for process in processes:
            process.send_signal(signal.SIGABRT)  # faulthandler writes its stack
        time.sleep(2)
        sys.stderr.write(run.log())
        report_hang(seconds)


def report_hang(seconds):
    (pytest.xfail if sys.version_info < FORK_IS_SAFE else pytest.fail)(f"the run hangs after {seconds} s")


def ranks(launcher):
    """Return the running processes of a launcher, rank 0 first."""
    found = {}
    for child in psutil.Process(launcher.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "-P" in child.cmdline():
                found[child.environ()["RANK"]] = child
    return [found[rank] for rank in sorted(found)]


def wait_for(moment, launcher, seconds=120):
    deadline = time.monotonic() + seconds
    while not moment():
        assert launcher.poll() is None, "the run has ended"
        if time.monotonic() > deadline:
            report_hang(seconds)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    prepare(folder)
    return folder


@pytest.mark.limit(40)  # three processes import all libraries
def test_two_processes_train_one_model_and_log_once(tmp_path):
    run = Run(tmp_path, ranks=2)
    words = ["fit", "-c", BASE, "-c", str(ROOT / "configs" / "debug.yaml"), "--trainer.devices", "2"]
    words += ["--trainer.max_steps", "1", "--trainer.strategy", "ddp"]
    assert finish(start(run.folder, *words), run) == 0, run.log()
    (config,) = run.folder.glob("runs/longce/*/config.yaml")
    events = EventAccumulator(str(config.parent)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0]


@pytest.mark.slow
def test_a_killed_rank_is_restarted_with_equal_losses_and_a_signal_stops_all(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    runs = [new_run(folder / name, config, ranks=2, workers=1) for name in ("undisturbed", "killed")]
    assert finish(start(runs[0].folder, *FIT), runs[0]) == 0
    assert runs[0].log().count("[rank: 0] Seed set to") == 1, "Lightning's messages appear once"

    launcher = start(runs[1].folder, *FIT, restarts=1)
    wait_for(lambda: len(runs[1].records()) >= 6, launcher)
    victim = ranks(launcher)[1]
    victim.send_signal(signal.SIGKILL)
    wait_for(lambda: len(ranks(launcher)) == 2 and victim not in ranks(launcher), launcher)
    before = len(runs[1].records())
    wait_for(lambda: len(runs[1].records()) > before + 2, launcher)
    launcher.send_signal(signal.SIGHUP)
    assert finish(launcher, runs[1]) == 0, runs[1].log()
    assert "stopping after this optimizer step" in runs[1].log()

    assert finish(start(runs[1].folder, *FIT), runs[1]) == 0, runs[1].log()
    assert not runs[1].differences(runs[0])


@pytest.mark.slow
def test_a_user_error_is_not_repeated_and_no_rank_outlives_its_launcher(folder):
    run = new_run(folder / "orphans", yaml.safe_load((folder / "config.yaml").read_text()), ranks=2)
    wrong = start(run.folder, *FIT, "--model.stride", "0", restarts=3)
    assert wrong.wait(120) == 2
    assert run.log().count("process 0 (pid") <= 1
    assert "`stride` (d) must be an integer of 1 or more, got 0" in run.log()
    assert "To resume" not in run.log()

    launcher = start(run.folder, *FIT)
    wait_for(lambda: len(run.records()) >= 2, launcher)
    left = ranks(launcher)
    launcher.kill()
    launcher.wait()
    assert not psutil.wait_procs(left, timeout=10)[1]


ORPHAN = """
import os, sys, time
from lightning_modules.utilities.orphans import end_with_launcher
end_with_launcher()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_process_ends_with_the_launcher_that_started_it(tmp_path):
    inner = f"import os, subprocess, sys; os.environ['{LAUNCHER}'] = str(os.getpid());"
    inner += f"p = subprocess.Popen([sys.executable, '-c', {ORPHAN!r}], stdout=open('said', 'w'));"
    inner += "print(p.pid, flush=True); p.wait()"
    outer = subprocess.Popen(
        [sys.executable, "-c", inner], cwd=tmp_path, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    child = psutil.Process(int(outer.stdout.readline()))
    wait_for(lambda: "ready" in (tmp_path / "said").read_text(), outer, 20)
    outer.kill()
    outer.communicate()
    assert not psutil.wait_procs([child], timeout=10)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nproc_per_node"),
        (["--nproc_per_node", "2"], "after `--`"),
        (["--nproc_per_node", "2", "--", "launch"], "after `--`"),
        (["--nproc_per_node", "2", "--nnodes", "2", "--", "fit"], "rdzv_endpoint"),
        (["--nproc_per_node", "2", "--max_restarts", "1", "--", "fit"], "--ckpt_path last"),
    ],
)
def test_launches_that_cannot_work(words, message, capsys):
    from lightning_modules.commands.cli.main import main

    with pytest.raises(SystemExit) as stopped:
        main(["launch", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_first_process_that_ends_decides_whether_to_restart():
    def failure(exitcode, timestamp):
        return SimpleNamespace(exitcode=exitcode, timestamp=timestamp)

    assert _is_user_error([failure(2, 1), failure(-9, 2)])
    assert not _is_user_error([failure(2, 2), failure(-9, 1)])
    assert not _is_user_error([])
