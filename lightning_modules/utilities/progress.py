"""Progress of long operations: a bar on a terminal, or a log line every half minute."""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only  # Lightning's own, without importing Lightning
from tqdm import tqdm

LOG_SECONDS = 30.0

_log = logging.getLogger(__name__)


class _LogLines(tqdm):
    """Progress bar that writes log lines, because a file full of carriage returns is unreadable."""

    _line = ""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        del pos
        if msg is None and (line := str(self)) != self._line:  # the last line of a bar may already be there
            self._line = line
            _log.info("%s", line)


def progress_bar(
    name: str,
    *,
    unit: str,
    total: int | None = None,
    initial: int = 0,
    leave: bool = True,
    scaled: bool = True,
    delay: float = 0.0,
) -> tqdm:
    """Return a progress bar with rate and, if the total is known, remaining time; only the first process shows it.

    It starts at ``initial``; numbers are ``scaled`` to thousands or millions. On a terminal, a closed bar stays if
    ``leave``; a notebook shows no other. It appears after ``delay`` seconds.
    """
    options: dict[str, Any] = {"desc": name, "unit": unit, "unit_scale": scaled, "total": total, "initial": initial}
    in_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    if getattr(rank_zero_only, "rank", 0) or (in_notebook and not leave):  # it cannot show two bars
        return tqdm(disable=True)
    if sys.stderr.isatty() or in_notebook:
        with suppress(OSError):  # if the stream is not a file
            if os.get_terminal_size(sys.stderr.fileno()).columns == 0:  # unknown; tqdm would hide the bar
                options |= {"ncols": 80, "nrows": 24}
        return tqdm(**options, leave=leave, delay=delay)
    # No line before the first delay. tqdm itself writes only line ends, which go to a dummy stream.
    return _LogLines(**options, mininterval=LOG_SECONDS, delay=LOG_SECONDS, miniters=1, file=io.StringIO(), leave=False)
