"""Tasks of lm-evaluation-harness: sets that papers report, and how tasks are loaded."""

import difflib
import hashlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

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
    """Tasks that are reported together.

    Attributes:
        tasks: Names of tasks and groups.
        folders: Their folders below ``lm_eval/tasks``: indexing all of them takes 15 s.
        scores: For each score the metrics that it is the mean of; a mean of scores lists their names.
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


def expand(words: Sequence[str]) -> list[str]:
    """Return the names of tasks, groups and files, each once, with sets written out."""
    return list(dict.fromkeys(name for word in words for name in (SETS[word].tasks if word in SETS else (word,))))


class LoadedTasks(NamedTuple):
    """The tasks of a name, without parts, and the groups of them, the innermost first."""

    tasks: dict[str, Task]
    groups: list[Group]


class TaskLoader:
    """Finds tasks by name and loads their data.

    Args:
        words: Tasks, groups, YAML files and sets that will be asked for.
        include_path: Folder of further task files, which win over those of the harness.
        num_fewshot: Examples in each prompt, for tasks that have any; by default as each task specifies.

    Raises:
        ValueError: If a task or the folder is unknown.
    """

    def __init__(
        self, words: Sequence[str], *, include_path: str | None = None, num_fewshot: int | None = None
    ) -> None:
        if include_path is not None and not Path(include_path).expanduser().is_dir():
            raise ValueError(f"`include_path` must be a folder of task files (YAML), got '{include_path}'.")
        if num_fewshot is not None and num_fewshot < 0:
            raise ValueError(f"`num_fewshot` must be 0 or more, got {num_fewshot}.")
        self.names = expand(words)
        self.num_fewshot = num_fewshot
        own = [str(Path(include_path).expanduser())] if include_path is not None else []
        folders = [str(_ROOT / folder) for word in words if word in SETS for folder in SETS[word].folders]
        with quiet():
            self.manager = TaskManager(include_path=[*folders, *own], include_defaults=False)
            if not all(map(self._is_known, self.names)):
                self.manager = TaskManager(include_path=own)
        for name in self.names:
            if not self._is_known(name):
                near = difflib.get_close_matches(name, {*TASKS, *GROUPS, *self.manager.all_tasks}, n=3)
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"Neither longce nor lm-evaluation-harness has a task or file '{name}'.{hint}")

    def _is_known(self, name: str) -> bool:
        return name in self.manager.task_index or (Path(name).suffix in (".yaml", ".yml") and Path(name).is_file())

    def task_file(self, name: str) -> str | None:
        """Return the hash of the user's task file; None for tasks of the harness, whose version is known."""
        entry = self.manager.task_index.get(name)
        path = Path(name) if entry is None else entry.yaml_path
        if path is None or not path.is_file() or _ROOT in path.resolve().parents:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    def load(self, name: str) -> LoadedTasks:
        """Return a task, or the tasks of a group, with their data, independent of what was loaded before.

        Raises:
            ValueError: If data or a package is missing, or the file is not a task.
        """
        with isolate_rng(), quiet():
            seed()
            try:
                found = self.manager.load([name])
            except Exception as error:  # a task, its functions and its data may raise anything
                raise ValueError(self._not_loaded(name, error)) from error
        for task in found["tasks"].values():
            default = task.get_config("num_fewshot")
            # A task with 0 has its examples in its text, or takes none.
            if self.num_fewshot is not None and default != 0:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            elif default is None:
                task.set_config(key="num_fewshot", value=0)
        groups: list[Group] = []
        for group in found.get("groups", {}).values():
            _add_innermost_first(group, groups)
        return LoadedTasks(dict(found["tasks"]), groups)

    def _not_loaded(self, name: str, error: Exception) -> str:
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__
        entry = self.manager.task_index.get(name)
        path = (entry.cfg or {}).get("dataset_path") if entry is not None else None
        source = f" (dataset '{path}')" if path else ""
        if isinstance(error, OSError):
            return (
                f"The data of the task '{name}'{source} cannot be loaded: {reason}. Without a network they must be in"
                " the cache of Hugging Face (HF_HOME): run the task once where there is one, with the same HF_HOME."
                " HF_HUB_OFFLINE=1 forbids the network; unset it to allow downloads."
            )
        if isinstance(error, ImportError):
            return f"The task '{name}' needs a package that is missing: {reason}. The extra `eval` has the known ones."
        return f"The task '{name}'{source} cannot be loaded: {type(error).__name__}: {reason}. Check its file."


def _add_innermost_first(group: Group, groups: list[Group]) -> None:
    for inner in group.get_all_groups(recursive=False):
        _add_innermost_first(inner, groups)
    if group not in groups:
        groups.append(group)


def seed() -> None:
    """Seed random numbers as the harness does, so that its tasks are the same everywhere."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


@contextmanager
def quiet() -> Iterator[None]:
    """Let the harness log nothing but warnings."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
