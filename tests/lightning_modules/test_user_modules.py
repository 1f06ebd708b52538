"""Who may find modules in the working directory."""

import importlib.util
import os
import sys

import pytest

from lightning_modules.user_modules import import_object, user_modules

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


@pytest.mark.parametrize("name", ["um_decoy", "um_namespace"])
def test_libraries_find_nothing_even_if_they_are_installed_below_the_folder(folder, name):
    with user_modules():
        import um_library  # type: ignore[import-not-found]

        assert importlib.util.find_spec(name) is None
        with pytest.raises(ImportError):
            um_library.look(name)


@pytest.mark.parametrize("before", [None, "", "1"])
def test_processes_that_are_started_do_not_search_the_folder(folder, monkeypatch, before):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with user_modules():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as `python -m` has it
    with user_modules():
        assert os.environ.get("PYTHONSAFEPATH") == before
