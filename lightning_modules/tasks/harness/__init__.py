"""Tasks of lm-evaluation-harness, an optional dependency that the other modules of this package import."""

import importlib.util
from collections.abc import Sequence

from lightning_modules.tasks.questions.registry import check_names, is_known


def split_tasks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into longce's tasks, groups and import paths, and those of lm-evaluation-harness.

    A name that both have, such as RULER's tasks, is longce's: it supports any length, and training.
    """
    paths = {name for name in names if "." in name and not name.endswith((".yaml", ".yml"))}
    theirs = [name for name in names if not is_known(name) and name not in paths]
    if theirs and importlib.util.find_spec("lm_eval") is None:
        try:
            check_names(theirs)
        except ValueError as error:
            raise ValueError(
                f"{error} Tasks of lm-evaluation-harness need the extra `eval`: pip install -e '.[eval]'."
            ) from None
    return [name for name in names if name not in theirs], list(dict.fromkeys(theirs))
