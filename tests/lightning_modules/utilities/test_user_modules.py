"""Who may find modules in the working directory."""

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from lightning_modules.utilities.user_modules import import_object, user_modules

LIBRARY = (
    "def look(name):\n    import importlib\n    return importlib.util.find_spec(name), importlib.import_module(name)\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory, and a library that is installed in it, as in a virtual environment that lies there."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "um_library.py").write_text(LIBRARY)
    (tmp_path / "um_decoy.py").write_text("raise AssertionError('a decoy was run')")
    (tmp_path / "um_namespace").mkdir()
    (tmp_path / "um_package").mkdir()
    (tmp_path / "um_package" / "__init__.py").write_text("")
    (tmp_path / "um_package" / "own.py").write_text(
        "import um_sibling\n\nclass Own:\n    def later(self):\n"
        "        import um_later\n        return um_later.__name__\n"
    )
    (tmp_path / "um_sibling.py").write_text("")
    (tmp_path / "um_later.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("um_")]:
        del sys.modules[name]


def test_what_the_user_names_is_found_and_what_that_imports_now_and_later(folder):
    path = list(sys.path)
    with user_modules():
        own = import_object("um_package.own.Own")
        os.chdir("/")
        assert own().later() == "um_later"
        assert sys.path == path
    with pytest.raises(ImportError):
        import_object("um_decoy.Name")


@pytest.mark.parametrize("name", ["benchmarks", "callbacks", "datamodules", "lightning_modules"])
def test_a_folder_of_the_user_hides_no_package_of_ours(folder, monkeypatch, name):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise AssertionError('a decoy was run')")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])  # as with PYTHONPATH
    monkeypatch.delitem(sys.modules, name, raising=False)
    with user_modules():
        found = importlib.util.find_spec(name)
        assert Path(found.origin).parents[1] == Path(__file__).parents[3]
        assert import_object("um_package.own.Own")


@pytest.mark.parametrize("name", ["um_decoy", "um_namespace"])
def test_libraries_find_nothing_even_if_they_are_installed_below_the_folder(folder, name):
    with user_modules():
        import um_library  # type: ignore[import-not-found]

        assert importlib.util.find_spec(name) is None
        with pytest.raises(ImportError):
            um_library.look(name)


def test_processes_of_multiprocessing_do_not_search_the_folder(folder, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (folder / "pickle.py").write_text("raise AssertionError('a decoy was run')")
    with user_modules():
        worker = multiprocessing.get_context("spawn").Process()
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as `python -m` has it
    with user_modules():
        assert "PYTHONSAFEPATH" not in os.environ
