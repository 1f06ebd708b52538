"""Tasks of lm-evaluation-harness: sets that papers report, and how tasks are loaded."""

import difflib
import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.tasks
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from lightning_modules.tasks.questions.registry import GROUPS, TASKS

_ROOT = Path(lm_eval.tasks.__file__).resolve().parent

Metric = tuple[str, str]
"""Task or group, and the key of one of its metrics: name and filter, such as ``acc,none``."""


class TaskSet(NamedTuple):
    """Tasks that are reported together; a score is the mean of metrics, or of other scores by name.

    ``folders`` are those of the tasks below ``lm_eval/tasks``: indexing all folders takes 15 s.
    """

    tasks: tuple[str, ...]
    folders: tuple[str, ...]
    scores: Mapping[str, tuple[Metric | str, ...]]


_LONGBENCH = {
    "Single-Document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Document QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-shot Learning": ("trec", "triviaqa", "samsum"),
    "Synthetic Tasks": ("passage_count", "passage_retrieval_en"),
    "Code Completion": ("lcc", "repobench-p"),
}

_SHORT = {
    "MMLU": ("mmlu", "acc,none"),
    "ARC-C": ("arc_challenge", "acc,none"),
    "RACE": ("race", "acc,none"),
    "BBH": ("bbh_cot_fewshot", "exact_match,get-answer"),
    "TruthfulQA": ("truthfulqa_mc2", "acc,none"),
    "CommonsenseQA": ("commonsense_qa", "acc,none"),
}

SETS = {
    "short": TaskSet(
        tuple(task for task, _ in _SHORT.values()),
        ("mmlu/default", "arc", "race", "bbh/cot_fewshot", "truthfulqa", "commonsense_qa"),
        {name: (metric,) for name, metric in _SHORT.items()},
    ),
    "longbench": TaskSet(
        tuple(f"longbench_{task}" for tasks in _LONGBENCH.values() for task in tasks),
        ("longbench",),
        {
            **{
                kind: tuple((f"longbench_{name}", "score,none") for name in names) for kind, names in _LONGBENCH.items()
            },
            "LongBench": tuple(_LONGBENCH),
        },
    ),
}
"""Sets of tasks, with scores named as in the tables of Fang et al. (2025).

``short`` has the six tasks of Table 10. The paper does not report the number of examples in the prompt or the metric;
here they are the harness's defaults (no examples, three with a chain of thought for BBH), and accuracy. ``longbench``
has the 16 English tasks of LongBench; its score is the mean of six categories, as in Table 8."""


class LoadedTasks(NamedTuple):
    """Tasks by name, their groups, and for each task the hash of the user's file that defines it, or None."""

    tasks: dict[str, Task]
    groups: dict[str, Group]
    files: dict[str, str | None]


def load_tasks(
    words: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    done: Callable[[str, str | None], Any] = lambda name, file: None,
) -> LoadedTasks:
    """Load tasks and the tasks of groups with their data; the options are those of `TaskConfig`.

    A task is not loaded if ``done``, called with its name and the hash of its file, returns a true value.
    """
    manager, names = find_names(words, include_path)
    loaded = LoadedTasks({}, {}, {})
    for name in names:
        file = _file_hash(manager, name)
        if done(name, file):
            loaded.files[name] = file
            continue
        with isolate_rng():
            seed()
            try:
                found = manager.load([name])
            except Exception as error:  # a task, its functions and its data may raise anything
                raise ValueError(_not_loaded(manager, name, error)) from error
        for part, task in found["tasks"].items():
            default = task.get_config("num_fewshot")
            # A task with 0 examples has them in its text, or does not support any.
            if default is None or (num_fewshot is not None and default != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
            loaded.tasks[part] = task
            loaded.files[part] = _file_hash(manager, part) or file
        for group in found.get("groups", {}).values():
            loaded.groups.update({inner.name: inner for inner in (*group.get_all_groups(), group)})
    return loaded


def find_names(words: Sequence[str], include_path: str | None = None) -> tuple[TaskManager, list[str]]:
    """Return an index that has all names, and each name once, with sets expanded."""
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise ValueError(f"`include_path` must be a folder of task files (YAML), got '{include_path}'.")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    names: dict[str, None] = {}
    folders: list[str] = []
    for word in words:
        if word in SETS:
            names.update(dict.fromkeys(SETS[word].tasks))
            folders += [str(_ROOT / folder) for folder in SETS[word].folders]
        else:
            names[word] = None
    own = [str(Path(include_path).expanduser())] if include_path is not None else []
    # Index as few folders as possible, because indexing all of them is slow.
    manager = TaskManager(include_path=[*folders, *own], include_defaults=False)
    if not all(_is_known(manager, name) for name in names):
        manager = TaskManager(include_path=own)
    for name in names:
        if not _is_known(manager, name):
            near = difflib.get_close_matches(name, {*TASKS, *GROUPS, *manager.all_tasks}, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"Neither longce nor lm-evaluation-harness has a task or file '{name}'.{hint}")
    return manager, list(names)


def _is_known(manager: TaskManager, name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def _file_hash(manager: TaskManager, name: str) -> str | None:
    """Return the hash of the user's task file; None for tasks of the harness, whose version is known."""
    entry = manager.task_index.get(name)
    path = Path(name) if entry is None else entry.yaml_path
    if path is None or not path.is_file() or _ROOT in path.resolve().parents:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _not_loaded(manager: TaskManager, name: str, error: Exception) -> str:
    entry = manager.task_index.get(name)
    path = (entry.cfg or {}).get("dataset_path") if entry is not None else None
    remedy = "Check its file."
    if isinstance(error, OSError):
        remedy = "Without a network, its data must be in the Hugging Face cache (HF_HOME); unset HF_HUB_OFFLINE."
    return f"The task '{name}' (dataset '{path}') cannot be loaded: {type(error).__name__}: {error} {remedy}"


def seed() -> None:
    """Seed random generators as the harness does, so that its tasks are the same everywhere."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
