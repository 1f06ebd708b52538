"""End a process when its launcher dies."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER = "LONGCE_LAUNCHER"
"""Environment variable with the launcher's process id, set for the processes that it starts."""

_PR_SET_PDEATHSIG = 1


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Declare this process the launcher of the processes that it starts within the block."""
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(LAUNCHER, None)


def end_with_launcher() -> None:
    """Let Linux kill this process when its launcher dies; it would otherwise keep its GPU until its next collective."""
    launcher = int(os.environ.pop(LAUNCHER, "0"))  # the processes that this one starts do not inherit it
    if not launcher or sys.platform != "linux":
        return
    if os.getppid() == launcher:  # false for processes that a script of the run started
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # the launcher died before the call above
        sys.exit("longce: error: the launcher of this process has ended.")
