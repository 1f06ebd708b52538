"""Error reports: what went wrong and how to fix it, or the traceback of an unexpected error."""

import os
import re
import sys
import traceback
from typing import NoReturn

from lightning_modules.utilities.errors import IncompleteError

_REMEDIES = {
    "DataLoader worker": (
        "A data loader process was killed, probably because memory ran out: lower `data.num_workers`."
    ),
    "Connection (closed|reset) by peer|gloo|NCCL": (
        "Another process of the run has ended or does not respond: see its output."
    ),
}
"""Advice for errors of torch, by a pattern of their message."""


def stop_with(error: Exception) -> NoReturn:
    """Print an error and exit: with status 2 for a user error, and 1 for a failure during the run.

    ``LONGCE_TRACEBACK=1`` also prints the traceback. An unexpected error is raised again, with a note.
    """
    # Compare by name: the classes of Lightning and torch may not be imported yet.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ConnectionError):  # an OSError, but caused by another process and not by the user
        _exit_with_remedy(error)
    elif isinstance(error, ValueError | OSError | FloatingPointError) or "MisconfigurationException" in kinds:
        _exit_with_message(error, status=2)
    if isinstance(error, IncompleteError):
        _exit_with_message(error, status=1)
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
        error.add_note(
            "Memory is insufficient: `longce plan` estimates what these settings need and suggests cheaper ones."
        )
        _exit_with_message(error, status=1)
    if isinstance(error, RuntimeError):
        _exit_with_remedy(error)
    error.add_note(
        "This error is unexpected: either a dependency does not accept one of the settings, or it is a bug in longce."
        " The last lines of the traceback name the file. Please report it with the command and its configs."
    )
    raise error


def _exit_with_remedy(error: BaseException) -> None:
    """Exit with an explanation of a known error of torch; return for any other error."""
    found: BaseException | None = error
    while found is not None:  # torch reports a killed loader at any point, also while another error is handled
        for pattern, remedy in _REMEDIES.items():
            if re.search(pattern, str(found)):
                original = str(found).partition("\n")[0]
                known = RuntimeError(
                    f"{remedy} Then run the same command again; `fit` resumes with `--ckpt_path RUN_FOLDER`."
                    f" (Original error: {original})"
                )
                _exit_with_message(known, status=1)
        found = found.__cause__ or found.__context__


def _exit_with_message(error: BaseException, *, status: int) -> NoReturn:
    if os.environ.get("LONGCE_TRACEBACK"):
        traceback.print_exc()
    cause = _root_cause(error)
    message = "\n".join([str(cause) or type(cause).__name__, *getattr(cause, "__notes__", [])])
    sys.stderr.write(f"longce: error: {message}\n(Set LONGCE_TRACEBACK=1 for the traceback.)\n")
    sys.exit(status)


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that a class in a config raised, without the parser's list of the types it tried."""
    while str(error).startswith("Does not validate") and (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
