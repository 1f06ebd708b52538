"""Explain what torch refused to load."""

import pickle
import re


def refused_pickle(error: BaseException) -> str:
    """Return why torch did not load a file with ``weights_only``, as the end of a sentence.

    Torch's own message advises to load the file without, which runs what is in it.
    """
    reason = first_cause(error)
    if named := re.search(r"GLOBAL (\S+)", reason):
        return f"holds code and must not be loaded: it would run `{named[1]}`"
    if isinstance(error, pickle.UnpicklingError):
        return f"is torn, or holds more than weights and must not be loaded ({reason})"
    return f"cannot be loaded ({reason})"


def first_cause(error: BaseException) -> str:
    """Return the first line of what an error began with: torch puts its advice around it."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return next(iter(str(error).strip().splitlines()), "") or repr(error)
