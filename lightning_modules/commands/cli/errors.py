"""How a command that failed ends: with what went wrong and what to do about it, or with a traceback if nobody knows."""

import os
import re
import sys
import traceback
from typing import NoReturn

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_modules.utilities.errors import IncompleteError

_REMEDIES = {
    "DataLoader worker": "A loader process was killed, by the system if memory ran out: lower `data.num_workers`.",
    "Connection (closed|reset) by peer|gloo|NCCL": (
        "Another process of the run has ended or does not answer: it says why."
    ),
}
"""What to do about errors of torch, by what they say."""


def stop_with(error: Exception) -> NoReturn:
    """Report what went wrong and exit: with 2 for what the user can fix, with 1 for what failed on the way.

    ``LONGCE_TRACEBACK=1`` shows where it arose. An error that nobody expected is raised again, with a note.
    """
    if isinstance(error, ValueError | OSError | FloatingPointError | MisconfigurationException):
        _exit(error, status=2)
    if isinstance(error, IncompleteError):
        _exit(error, status=1)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        error.add_note("There is too little memory: `longce plan` says what these settings take, and what takes less.")
        _exit(error, status=1)
    if isinstance(error, RuntimeError):
        _exit_with_remedy(error)
    error.add_note(
        "longce has no explanation for this. It may be a setting that a package below it does not take, or a bug: the"
        " last lines above name the file. Please report it with the command and its configs."
    )
    raise error


def _exit_with_remedy(error: BaseException) -> None:
    """Explain an error of torch; returns if it is none that we know."""
    found: BaseException | None = error
    while found is not None:  # torch reports a killed loader wherever the process is, in another error's course
        for pattern, remedy in _REMEDIES.items():
            if re.search(pattern, str(found)):
                noticed = str(found).partition("\n")[0]
                known = RuntimeError(
                    f"{remedy} Then run the same command again, `fit` with `--ckpt_path FOLDER` of the run."
                    f" (Noticed by: {noticed})"
                )
                _exit(known, status=1)
        found = found.__cause__ or found.__context__


def _exit(error: BaseException, *, status: int) -> NoReturn:
    if os.environ.get("LONGCE_TRACEBACK"):
        traceback.print_exc()
    cause = _root_cause(error)
    message = "\n".join([str(cause) or type(cause).__name__, *getattr(cause, "__notes__", [])])
    sys.stderr.write(f"longce: error: {message}\n(Set LONGCE_TRACEBACK=1 to see where.)\n")
    sys.exit(status)


def _root_cause(error: BaseException) -> BaseException:
    """What a class named in a config complained of, without the parser's list of all it tried."""
    while str(error).startswith("Does not validate") and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
