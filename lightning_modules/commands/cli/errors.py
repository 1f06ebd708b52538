"""Report errors: what went wrong and what to do about it, or a traceback of an unexpected error."""

import os
import re
import sys
import traceback
from typing import NoReturn

from lightning_modules.utilities.errors import IncompleteError

_REMEDIES = {
    "DataLoader worker": "A loader process was killed, by the system if memory ran out: lower `data.num_workers`.",
    "Connection (closed|reset) by peer|gloo|NCCL": (
        "Another process of the run has ended or does not answer: see its own output."
    ),
}
"""Advice for errors of torch, by a pattern of their message."""


def stop_with(error: Exception) -> NoReturn:
    """Report an error and exit: with 2 for what the user can fix, with 1 for what failed on the way.

    ``LONGCE_TRACEBACK=1`` shows where it arose. An unexpected error is raised again, with a note.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}  # of Lightning and torch, which may not be imported
    if isinstance(error, ConnectionError):  # another process has ended: nothing that a user must fix here
        _exit_with_remedy(error)
    elif isinstance(error, ValueError | OSError | FloatingPointError) or "MisconfigurationException" in kinds:
        _exit(error, status=2)
    if isinstance(error, IncompleteError):
        _exit(error, status=1)
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
        error.add_note(
            "There is too little memory: `longce plan` estimates what these settings take, and what takes less."
        )
        _exit(error, status=1)
    if isinstance(error, RuntimeError):
        _exit_with_remedy(error)
    error.add_note(
        "longce has no explanation for this. It may be a setting that a package below it does not take, or a bug: the"
        " last lines above name the file. Please report it with the command and its configs."
    )
    raise error


def _exit_with_remedy(error: BaseException) -> None:
    """Explain a known error of torch, and return after any other."""
    found: BaseException | None = error
    while found is not None:  # torch reports a killed loader wherever the process is, in the course of another error
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
    """Return what a class named in a config complained of, without the parser's list of all it tried."""
    while str(error).startswith("Does not validate") and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
