"""lm-evaluation-harness as an engine: its tasks, asked of our models.

It is an optional extra. What runs without it stands here; the other modules of this package import it.
"""

import importlib.util
from typing import Literal

Truncation = Literal["middle", "left"]
"""Where a prompt that is too long loses tokens: LongBench keeps both ends, lm-evaluation-harness the last ones."""


def check_installed() -> None:
    """Raise a ``ValueError`` if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("This needs lm-evaluation-harness: install the extra `eval` (`pip install -e '.[eval]'`).")
