"""How far a long work is: a bar on a terminal, a line in the log every half minute elsewhere."""

import io
import logging
import sys
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

LOG_SECONDS = 30.0

_log = logging.getLogger(__name__)


class _LogLines(tqdm):
    """A bar whose states are lines of a log: a file full of carriage returns is useless."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        del pos
        if msg is None:
            _log.info("%s", str(self))


def progress_bar(name: str, *, unit: str, total: int | None = None) -> tqdm:
    """Return a bar with rate and, if the total is known, time left; only the first of several processes shows it."""
    options: dict[str, Any] = {"desc": name, "unit": unit, "unit_scale": True, "total": total}
    if getattr(rank_zero_only, "rank", 0):
        return tqdm(disable=True)
    if sys.stderr.isatty():
        return tqdm(**options)
    # No first line at the start, and nothing on the stream that tqdm would end its line on.
    return _LogLines(**options, mininterval=LOG_SECONDS, delay=LOG_SECONDS, miniters=1, file=io.StringIO(), leave=False)
