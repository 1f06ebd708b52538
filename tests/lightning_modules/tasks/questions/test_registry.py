import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_modules.tasks.questions.registry import GROUPS, find_tasks, hash_task_code
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


def test_the_code_of_a_custom_task_identifies_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    base = "from tests.support.toy_tasks import Guess\n\nclass Base(Guess):\n    name = 'own'\n"
    own = "from code_base import Base\n\nclass Own(Base):\n    max_new_tokens = {}\n"
    hashes = []
    for base_text, own_text in ((base, own.format(3)), (base, own.format(4)), (base + "\n", own.format(3))):
        (tmp_path / "code_base.py").write_text(base_text)
        (tmp_path / "code_own.py").write_text(own_text)
        for module in ("code_base", "code_own"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        hashes.append(hash_task_code(find_tasks(["code_own.Own"])[0]))
    assert len(set(hashes)) == 3
    assert all(each.startswith("sha256:") for each in hashes)
    assert {hash_task_code(task) for task in find_tasks(["ruler_synthetic", "passkey"])} == {""}


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_task_of_a_notebook_has_no_code_in_a_file(file, monkeypatch):
    module = ModuleType("__main__")
    if file is not None:
        module.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", module)
    task = type("Own", (Task,), {"__module__": "__main__", "name": "own", "example": Own.example})()
    assert hash_task_code(task) == ""


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
