"""Tasks of lm-evaluation-harness: how they are found and loaded."""

import difflib
import hashlib
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval.tasks import TaskManager

from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.harness.results import SETS
from lightning_modules.tasks.questions.registry import GROUPS, TASKS

_ROOT = Path(lm_eval.tasks.__file__).resolve().parent


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
    own = []
    if include_path is not None:
        own.append(str(Path(include_path).expanduser()))
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
