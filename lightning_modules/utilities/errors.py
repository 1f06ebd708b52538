"""Errors that the command line reports without a traceback, and helpers for messages."""

import difflib
import pickle
import re
from collections.abc import Iterable


class IncompleteError(Exception):
    """Raised if part of the work failed; the rest is kept. The message reports the failures and what to do."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."


def refused_pickle(error: BaseException) -> str:
    """Return why torch did not load a file with ``weights_only``, as the end of a sentence.

    Torch's own message recommends loading the file without it, which would run the code in the file.
    """
    reason = first_cause(error)
    named = re.search(r"GLOBAL (\S+)", reason)
    if named:
        return f"contains code and must not be loaded: it would run `{named[1]}`"
    if isinstance(error, pickle.UnpicklingError):
        return f"is torn, or contains more than weights and must not be loaded ({reason})"
    return f"cannot be loaded ({reason})"


def first_cause(error: BaseException) -> str:
    """Return the first line of an error's original cause, without the advice that torch adds."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return next(iter(str(error).strip().splitlines()), "") or repr(error)
