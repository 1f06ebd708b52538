"""End a process when the launcher that started it is gone."""

import ctypes
import os
import signal
import sys

LAUNCHER = "LONGCE_LAUNCHER"
"""Environment variable with the process id of the launcher, set for the processes that it starts."""

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Let Linux kill this process when the launcher that started it dies, even by a signal it cannot handle.

    Otherwise a rank that computes alone would keep its GPU until its next collective.
    """
    launcher = int(os.environ.pop(LAUNCHER, "0"))  # not for the processes that this one starts
    if not launcher or sys.platform != "linux":
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:  # it died before the call above
        sys.exit("longce: error: the launcher of this process has ended.")
