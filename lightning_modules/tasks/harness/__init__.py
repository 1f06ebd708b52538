"""Tasks of lm-evaluation-harness, an optional dependency that the other modules of this package import."""

import importlib.util
from collections.abc import Sequence

from lightning_modules.tasks.questions.registry import check_names, is_known


def split_tasks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into longce's tasks, groups and import paths, and those of lm-evaluation-harness.

    A name that both have, such as RULER's tasks, is longce's: it supports any length, and training.
    """
    ours = []
    theirs = []
    for name in names:
        is_import_path = "." in name and not name.endswith((".yaml", ".yml"))
        if is_known(name) or is_import_path:
            ours.append(name)
        else:
            theirs.append(name)
    if theirs and importlib.util.find_spec("lm_eval") is None:
        try:
            check_names(theirs)
        except ValueError as error:
            raise ValueError(
                f"{error} Tasks of lm-evaluation-harness need the extra `eval`: pip install -e '.[eval]'."
            ) from None
    return ours, list(dict.fromkeys(theirs))
