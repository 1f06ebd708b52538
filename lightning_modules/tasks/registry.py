"""Tasks by their names."""

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_modules.tasks.first_sentence import FirstSentence
from lightning_modules.tasks.haystacks import Essays
from lightning_modules.tasks.key_values import KeyValues
from lightning_modules.tasks.longeval import LongEvalLines
from lightning_modules.tasks.needle import Needle
from lightning_modules.tasks.needles import RULER_NEEDLES, Needles
from lightning_modules.tasks.passkey import Passkey
from lightning_modules.tasks.task import Task


@dataclass(frozen=True)
class Sources:
    """What tasks are made of, other than their own words.

    Attributes:
        essays: Prose around needles.
    """

    essays: Essays = field(default_factory=Essays)


def _needles(name: str) -> Callable[[Sources], Task]:
    return lambda sources: Needles(name, RULER_NEEDLES[name], sources.essays)


TASKS: dict[str, Callable[[Sources], Task]] = {
    **{name: _needles(name) for name in RULER_NEEDLES},
    "longeval_lines": lambda sources: LongEvalLines(),
    "needle": lambda sources: Needle(sources.essays),
    "passkey": lambda sources: Passkey(),
    "first_sentence": lambda sources: FirstSentence(sources.essays),
    "key_values": lambda sources: KeyValues(),
    "key_values_query_before": lambda sources: KeyValues("before"),
    "key_values_query_both": lambda sources: KeyValues("both"),
}
"""What makes each task."""

GROUPS: dict[str, tuple[str, ...]] = {
    "niah": tuple(RULER_NEEDLES),
    "ruler": tuple(RULER_NEEDLES),
    "longeval": ("longeval_lines",),
    "lost_in_the_middle": ("key_values", "key_values_query_before", "key_values_query_both"),
    "retrieval": ("needle", "passkey", "first_sentence", "longeval_lines", "key_values"),
}
"""Names that stand for several tasks."""


def find_tasks(names: Sequence[str], *, haystack: str | None = None) -> list[Task]:
    """Tasks by name, each once, in the order in which they are named.

    Args:
        names: Names of `TASKS` or `GROUPS`, or import paths such as ``package.module.Class`` of classes of one's own
            that derive from `Task` and take no arguments.
        haystack: Folder with text files around the needles; made-up prose by default, see `Essays`.

    Raises:
        ValueError: If there are no names, a name is unknown, or the haystack cannot be read.
    """
    if not names:
        raise ValueError(f"No task is named: {_choice()}")
    sources = Sources(essays=Essays(haystack))
    single = [name for group in names for name in GROUPS.get(group, (group,))]
    return [_make(name, sources) for name in dict.fromkeys(single)]


def _make(name: str, sources: Sources) -> Task:
    if name in TASKS:
        return TASKS[name](sources)
    if "." in name:
        return _import(name)
    near = difflib.get_close_matches(name, [*TASKS, *GROUPS], n=1)
    raise ValueError(f"There is no task '{name}'{f'; did you mean {near[0]!r}?' if near else '.'} {_choice()}")


def _choice() -> str:
    return f"Tasks: {', '.join(TASKS)}. Groups: {', '.join(GROUPS)}. Or name a class of your own: package.module.Class."


def _import(path: str) -> Task:
    """A task of the user's own."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The task '{path}' cannot be imported ({error}): is its folder on PYTHONPATH?") from None
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ValueError(f"'{path}' is no class that derives from lightning_modules.tasks.task.Task.")
    try:
        return kind()
    except TypeError as error:
        raise ValueError(f"The task '{path}' cannot be made without arguments ({error}): give them defaults.") from None
