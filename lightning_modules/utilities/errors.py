"""Errors that the command line explains, and parts of messages."""

import difflib
from collections.abc import Iterable


class IncompleteError(Exception):
    """Part of the work failed. The rest is kept, and the message reports what failed and what to do."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known one that is most like it, or all that are known."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."
