"""Commands of `longce` in this process."""

import contextlib
import io
import sys

import pytest

from longce.cli.main import main


def longce(*words, folder="."):
    """Run a command in a folder."""
    words = [*map(str, words)]
    before = sys.argv
    sys.argv = ["longce", *words]  # which Lightning reads, and the names of runs
    try:
        with contextlib.chdir(folder):
            main(words)
    finally:
        sys.argv = before


def refused(*words, folder="."):
    """What a command says when it refuses: it must end with status 2 and without a traceback."""
    with pytest.raises(SystemExit) as stopped, contextlib.redirect_stderr(io.StringIO()) as printed:
        longce(*words, folder=folder)
    message = printed.getvalue()
    assert stopped.value.code == 2, message
    assert "Traceback" not in message
    return message
