"""End a process when the launcher that started it is gone."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER = "LONGCE_LAUNCHER"
"""Environment variable with the process id of the launcher, set for the processes that it starts."""

_PR_SET_PDEATHSIG = 1


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Name this process as the launcher of those that it starts within the block."""
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(LAUNCHER, None)


def end_with_launcher() -> None:
    """Let Linux kill this process when its launcher dies, or it would keep its GPU until its next collective."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))  # not for the processes that this one starts
    if not launcher or sys.platform != "linux":
        return
    if os.getppid() == launcher:  # not for a process that a script of the run has started
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # it died before the call above
        sys.exit("longce: error: the launcher of this process has ended.")
