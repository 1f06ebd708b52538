"""Find tasks by name."""

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_modules.tasks.questions import retrieval, ruler
from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.multi_document_qa import MultiDocumentQA, Query, Reference, ReferenceQA
from lightning_modules.tasks.questions.options import base_name, configure
from lightning_modules.tasks.questions.question_answering import QuestionAnswering
from lightning_modules.tasks.questions.task import SETTINGS, Task, WordedTask
from lightning_modules.utilities.identity import combined_hash, file_hashes
from lightning_modules.utilities.user_modules import import_object

SQUAD = "SQuAD's dev-v2.0.json (https://rajpurkar.github.io/SQuAD-explorer)"
HOTPOT = "HotpotQA's hotpot_dev_distractor_v1.json (https://hotpotqa.github.io)"


class Sources(NamedTuple):
    """Prose around needles, local question files, and the number of passages of ``multi_document_qa``."""

    essays: Essays
    squad: str | None = None
    hotpot: str | None = None
    nq_open: str | None = None
    documents: int | None = None


def _make_worded(name: str, sources: Sources) -> Task:
    name, setting = configure(name)
    return WordedTask(name, setting, sources.essays, {**ruler.KINDS, **retrieval.KINDS})


def _make_multi_document_qa(query: Query, sources: Sources) -> Task:
    return MultiDocumentQA(sources.nq_open, sources.documents, query)


def _make_reference_qa(setting: Reference, sources: Sources) -> Task:
    return ReferenceQA(setting, sources.nq_open)


def _make_question_answering(name: Literal["qa_1", "qa_2"], option: str, file: str, sources: Sources) -> Task:
    path = getattr(sources, option)
    if path is None:
        raise ValueError(
            f"The task '{name}' needs a file: set `{option}` to a local copy of {file}. The group 'ruler_synthetic' has"
            " RULER's 11 tasks that need no file."
        )
    return QuestionAnswering(name, path)


_NEEDLES = tuple(name for name, setting in SETTINGS.items() if setting["kind"] == "needles")

TASKS: dict[str, Callable[[Sources], Task]] = {
    **{name: partial(_make_worded, name) for name in SETTINGS},
    "qa_1": partial(_make_question_answering, "qa_1", "squad", SQUAD),
    "qa_2": partial(_make_question_answering, "qa_2", "hotpot", HOTPOT),
    "multi_document_qa": partial(_make_multi_document_qa, "after"),
    "multi_document_qa_query_before": partial(_make_multi_document_qa, "before"),
    "multi_document_qa_query_both": partial(_make_multi_document_qa, "both"),
    "multi_document_qa_oracle": partial(_make_reference_qa, "oracle"),
    "multi_document_qa_closed_book": partial(_make_reference_qa, "closed_book"),
}
"""The constructor of each task."""

GROUPS: dict[str, tuple[str, ...]] = {
    "niah": _NEEDLES,
    "ruler": (*_NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2"),
    "ruler_synthetic": (*_NEEDLES, "vt", "cwe", "fwe"),
    "longeval": ("longeval_lines",),
    "lost_in_the_middle": (
        *("key_values", "key_values_query_before", "key_values_query_both"),
        *("multi_document_qa", "multi_document_qa_query_before", "multi_document_qa_query_both"),
    ),
    "retrieval": ("needle", "passkey", "first_sentence", "longeval_lines", "key_values"),
}
"""Names of groups of tasks."""


def is_in_essays(name: str) -> bool:
    """Return whether the answers of a task are hidden in essays, or in synthetic prose."""
    if base_name(name) in _NEEDLES:
        return bool(configure(name)[1]["haystack"] == "essay")
    return name in ("needle", "first_sentence")


def find_tasks(names: Sequence[str], *, haystack: str | None = None, **sources: Any) -> list[Task]:
    """Return tasks by name, each once, in the given order.

    Names are those of `TASKS`, with options such as ``vt(hops=8)``, those of `GROUPS`, and import paths such as
    ``package.module.Class`` of classes that derive from `Task` and take no arguments. ``haystack`` is the folder of
    `Essays`; ``sources`` are the other `Sources`.
    """
    check_names(names)
    texts = Sources(Essays(haystack), **sources)
    single: dict[str, None] = {}
    for group in names:
        for name in GROUPS.get(group, (group,)):
            if base_name(name) in SETTINGS:
                name, _ = configure(name)
            single[name] = None
    return [_make_task(name, texts) for name in single]


def _make_task(name: str, sources: Sources) -> Task:
    if base_name(name) in SETTINGS:
        return _make_worded(name, sources)
    if name in TASKS:
        return TASKS[name](sources)
    return _import_task(name)


def hash_task_code(task: Task) -> str:
    """Return a hash of the files that define the class of a task and its base classes; empty for longce's tasks.

    Other files that these import do not count, and neither does code that is not in a file, such as that of a notebook.
    """
    known = (*sys.stdlib_module_names, "lightning_modules")
    files = []
    for kind in type(task).__mro__:
        if kind.__module__.partition(".")[0] in known:
            continue
        try:
            file = Path(inspect.getfile(kind))
        except (OSError, TypeError):
            continue
        if file.is_file():
            files.append(file)
    return f"sha256:{combined_hash(file_hashes(files))}" if files else ""


def is_known(name: str) -> bool:
    """Return whether a name is that of a task, perhaps with options, or of a group."""
    return base_name(name) in TASKS or base_name(name) in GROUPS


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not in `TASKS`, not in `GROUPS`, and not import paths; suggest the closest known name.

    Options are only for tasks of `tasks.yaml` that have some.
    """
    for name in names:
        base = base_name(name)
        if base in SETTINGS:
            configure(name)
        elif is_known(name) and name != base:
            raise ValueError(
                f"'{base}' has no options: remove those of '{name}'. Only RULER's single tasks have options."
            )
        elif not is_known(name) and "." not in base:
            near = difflib.get_close_matches(base, [*TASKS, *GROUPS], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(
                f"Unknown task '{name}'.{hint} Tasks: {', '.join(TASKS)}. Groups: {', '.join(GROUPS)}. Or use a class"
                " of your own: package.module.Class."
            )


def _import_task(path: str) -> Task:
    try:
        kind = import_object(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The task '{path}' cannot be imported ({error}): is its folder on PYTHONPATH?") from None
    return kind()
