from pathlib import Path

import pytest

from lightning_modules.tasks.questions.registry import GROUPS, TASKS, find_tasks
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


def test_names_and_groups_are_found_once_in_order():
    names = [task.name for task in find_tasks(["passkey", "niah", "retrieval", "niah_single_2"])]
    assert names == ["passkey", *GROUPS["niah"], "needle", "first_sentence", "longeval_lines", "key_values"]


def test_every_group_is_made_of_tasks():
    for group, names in GROUPS.items():
        assert set(names) <= set(TASKS), group
        assert group not in TASKS
        assert len(set(names)) == len(names)


def test_ones_own_task_is_found_by_its_path(importable):
    assert find_tasks(["own_tasks.Own"])[0].name == "own"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "`tasks` is empty. Tasks: niah_single_1, .* Groups: "),
        (["niah_singel_1"], "Unknown task 'niah_singel_1'. Did you mean 'niah_single_1'.* Tasks: "),
        (["@"], "Unknown task '@'. Tasks: "),
        (["nowhere.Task"], "'nowhere.Task' cannot be imported .*PYTHONPATH"),
        (["own_tasks.Missing"], "'own_tasks.Missing' cannot be imported"),
        (["own_tasks.Configured"], "cannot be created without arguments .*'size'.*give them defaults"),
        (["os.path"], "'os.path' is not a subclass of"),
    ],
)
def test_other_names_are_refused(names, message, importable):
    with pytest.raises(ValueError, match=message):
        find_tasks(names)


def test_a_haystack_reaches_the_tasks(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with \.txt files"):
        find_tasks(["needle"], haystack=str(tmp_path))
