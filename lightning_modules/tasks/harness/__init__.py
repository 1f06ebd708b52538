"""lm-evaluation-harness as an engine: its tasks, asked of our models.

It is an optional extra: this module works without it, the other modules of this package import it.
"""

import importlib.util
from collections.abc import Sequence

from lightning_modules.tasks.questions.registry import GROUPS, TASKS, check_names


def split_tasks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into our tasks, groups and import paths, and those of lm-evaluation-harness.

    A name that both have, such as RULER's, is ours: it works at any length, and while training.

    Raises:
        ValueError: If a name is not ours and lm-evaluation-harness is not installed.
    """
    theirs = [name for name in names if name not in TASKS and name not in GROUPS and not _is_import_path(name)]
    if theirs and importlib.util.find_spec("lm_eval") is None:
        try:
            check_names(theirs)
        except ValueError as error:
            raise ValueError(
                f"{error} Tasks of lm-evaluation-harness need the extra `eval`: pip install -e '.[eval]'."
            ) from None
    return [name for name in names if name not in theirs], list(dict.fromkeys(theirs))


def _is_import_path(name: str) -> bool:
    return "." in name and not name.endswith((".yaml", ".yml"))
