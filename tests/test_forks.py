"""Forked processes end with their test, or one that hangs would hang the whole run."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import pytest

from tests.support.distributed import run_distributed, run_like_torchrun
from tests.support.forks import call


def hang(folder):
    (folder / "begun").touch()
    time.sleep(30)
    (folder / "ended").touch()


def hang_as_rank(rank, world_size, folder):
    hang(folder)


def fail_or_hang(folder):
    if os.environ["RANK"] == "1":
        raise ValueError("of one rank")
    hang(folder)


def interrupt(folder):
    """Raise a KeyboardInterrupt in the test when the process has begun."""
    while not (folder / "begun").exists():
        time.sleep(0.1)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("run", [partial(call, hang), partial(run_distributed, hang_as_rank)])
def test_processes_that_hang_end_with_their_test(run, tmp_path):
    threading.Thread(target=interrupt, args=(tmp_path,)).start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    for process in multiprocessing.active_children():
        process.join()
    assert not (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path):
    with pytest.raises(AssertionError, match="of one rank"):
        run_like_torchrun(fail_or_hang, tmp_path, log=tmp_path / "printed")
    assert not (tmp_path / "ended").exists()
