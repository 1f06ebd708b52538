from pathlib import Path

import pytest

from lightning_modules.tasks.questions.registry import GROUPS, find_tasks
from lightning_modules.tasks.questions.task import Task


class Own(Task):
    name = "own"

    def example(self, prompter, length, index, *, seed=0, depth=None):
        raise NotImplementedError


class Configured(Own):
    def __init__(self, size):
        self.size = size


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """This file as a module that can be imported by name."""
    (tmp_path / "own_tasks.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(tmp_path)


def test_names_and_groups_give_each_task_once():
    names = [task.name for task in find_tasks(["passkey", "niah", "retrieval", "niah_single_2"])]
    assert names == ["passkey", *GROUPS["niah"], "needle", "first_sentence", "longeval_lines", "key_values"]


def test_a_custom_task_is_imported(importable):
    assert find_tasks(["own_tasks.Own"])[0].name == "own"


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("niah_singel_1", ValueError, "niah_single_1"),
        ("@", ValueError, ""),
        ("nowhere.Task", ValueError, ""),
        ("own_tasks.Missing", ValueError, ""),
        ("own_tasks.Configured", TypeError, "size"),
    ],
)
def test_other_names_are_refused(name, error, hint, importable):
    with pytest.raises(error, match=rf"{name.rpartition('.')[2]}.*{hint}"):
        find_tasks([name])


def test_tasks_use_the_haystack(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        find_tasks(["needle"], haystack=str(tmp_path))
