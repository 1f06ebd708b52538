"""Forked processes end with their test, or one that hangs would hang the whole run."""

import os
import signal
import threading
import time

import pytest

from tests.support.distributed import run_like_torchrun
from tests.support.forks import call


def hang(folder):
    (folder / "begun").touch()
    time.sleep(30)
    (folder / "ended").touch()


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
def test_a_process_that_hangs_ends_with_its_test(tmp_path):
    threading.Thread(target=interrupt, args=(tmp_path,)).start()
    with pytest.raises(KeyboardInterrupt):
        call(hang, tmp_path)
    assert not (tmp_path / "ended").exists()


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(tmp_path):
    with pytest.raises(AssertionError, match="of one rank"):
        run_like_torchrun(fail_or_hang, tmp_path, log=tmp_path / "printed")
    assert not (tmp_path / "ended").exists()
