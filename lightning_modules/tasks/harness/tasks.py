"""Tasks of lm-evaluation-harness: sets that papers report, and how tasks are loaded."""

import difflib
import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.tasks
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.tasks import TaskManager

from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.questions.registry import GROUPS, TASKS

_ROOT = Path(lm_eval.tasks.__file__).resolve().parent


class TaskSet(NamedTuple):
    """Tasks that are reported together, below ``lm_eval/tasks`` in ``folders``: indexing all folders takes 15 s.

    A score is the mean of metrics of tasks, such as ``("mmlu", "acc,none")``, or of other scores by name.
    """

    tasks: tuple[str, ...]
    folders: tuple[str, ...]
    scores: Mapping[str, Sequence[Any]]


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
        tasks=tuple(task for task, _ in _SHORT.values()),
        folders=("mmlu/default", "arc", "race", "bbh/cot_fewshot", "truthfulqa", "commonsense_qa"),
        scores={name: [metric] for name, metric in _SHORT.items()},
    ),
    "longbench": TaskSet(
        tasks=tuple(f"longbench_{name}" for names in _LONGBENCH.values() for name in names),
        folders=("longbench",),
        scores={kind: [(f"longbench_{name}", "score,none") for name in names] for kind, names in _LONGBENCH.items()}
        | {"LongBench": list(_LONGBENCH)},
    ),
}
"""Sets of tasks, with scores named as in the tables of Fang et al. (2025).

``short`` has the six tasks of Table 10. The paper does not report the number of examples in the prompt or the metric;
here they are the harness's defaults (no examples, three with a chain of thought for BBH), and accuracy. ``longbench``
has the 16 English tasks of LongBench; its score is the mean of six categories, as in Table 8."""


def find_names(words: Sequence[str], include_path: str | None = None) -> tuple[TaskManager, list[str]]:
    """Return an index that has all names, and each name once, with sets expanded."""
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise ValueError(f"`include_path` must be a folder of task files (YAML), got '{include_path}'.")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names: list[str] = []
    folders: list[str] = []
    for word in words:
        if word in SETS:
            names += SETS[word].tasks
            folders += [str(_ROOT / folder) for folder in SETS[word].folders]
        else:
            names.append(word)
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
    return manager, list(dict.fromkeys(names))


def _is_known(manager: TaskManager, name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def file_hash(manager: TaskManager, name: str) -> str | None:
    """Return the hash of the user's task file; None for tasks of the harness, whose version is known."""
    entry = manager.task_index.get(name)
    path = Path(name) if entry is None else entry.yaml_path
    if path is None or not path.is_file() or _ROOT in path.resolve().parents:
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load_tasks(manager: TaskManager, name: str, config: TaskConfig) -> dict[str, Any]:
    """Load a task, or the tasks of a group, with their data; a ``ValueError`` if that fails."""
    with isolate_rng():
        seed()
        try:
            loaded: dict[str, Any] = manager.load([name])
        except Exception as error:  # a task, its functions and its data may raise anything
            remedy = "Check its file."
            if isinstance(error, OSError):
                remedy = "Unset HF_HUB_OFFLINE, or without a network, put its data into the cache (HF_HOME)."
            entry = manager.task_index.get(name)
            path = (entry.cfg or {}).get("dataset_path") if entry is not None else None
            raise ValueError(
                f"The task '{name}' (dataset '{path}') cannot be loaded: {type(error).__name__}: {error} {remedy}"
            ) from error
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        # A task with 0 examples has them in its text, or does not support any.
        if default is None or (config.num_fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=config.num_fewshot or 0)
        if config.generation and task.OUTPUT_TYPE == "generate_until":
            task.set_config(key="generation_kwargs", value=config.generation, update=True)
    return loaded


def seed() -> None:
    """Seed random generators as the harness does, so that its tasks are the same everywhere."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
