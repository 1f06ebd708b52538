"""Errors that the command line reports without a traceback, and helpers for messages."""

import difflib
from collections.abc import Iterable


class IncompleteError(Exception):
    """Raised if part of the work failed; the rest is kept. The message reports the failures and what to do."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."
