"""Import the user's own classes from the working directory, and nothing else from there.

If the working directory were on ``sys.path``, a file ``wandb.py`` in it would run as soon as any library looks for the
optional package of that name. Here, only modules that the user names are found in it, after those that are installed.
The packages of this project come first: a folder ``callbacks`` of the user's hides none of them.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

_OWN_PACKAGES = ("benchmarks", "callbacks", "datamodules", "lightning_modules", "longce")
_OWN_FOLDER = str(Path(__file__).parents[2])
_IMPORTERS = (__name__, "jsonargparse._util", "multiprocessing.spawn")
"""Modules that import classes the user names: this one, the parser of options and configs, and worker processes."""


class OwnPackages(MetaPathFinder):
    """Finder for the packages of this project, before folders of their names elsewhere on ``sys.path``."""

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if path is None and fullname in _OWN_PACKAGES:
            return PathFinder.find_spec(fullname, [_OWN_FOLDER], target)
        return None


class UserModules(MetaPathFinder):
    """Finder for modules of one folder that the user names, and for the modules that these import."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._found: set[str] = set()

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if path is not None:  # a submodule, which is found through its package
            return None
        importer = _importing_module(sys._getframe(1))
        if importer not in _IMPORTERS and importer.partition(".")[0] not in self._found:
            return None
        spec = PathFinder.find_spec(fullname, [self._folder], target)
        if spec is not None:
            self._found.add(fullname)
        return spec


def _importing_module(frame: FrameType | None) -> str:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "importlib":
            return name
        frame = frame.f_back
    return ""


def find_user_modules() -> tuple[MetaPathFinder, MetaPathFinder]:
    """Make modules of the working directory importable by name, but not instead of the packages of this project.

    Returns:
        The finders that have been added to ``sys.meta_path``.
    """
    own = OwnPackages()
    users = UserModules(Path.cwd())
    sys.meta_path.insert(0, own)
    sys.meta_path.append(users)
    return own, users


@contextmanager
def user_modules() -> Iterator[None]:
    """Make modules of the working directory importable by name within the block, and keep it off ``sys.path``.

    Python would put it on the path of the processes that multiprocessing starts, unless ``PYTHONSAFEPATH`` is set. If
    it is on the path of this process (``python -m``), it stays on theirs.
    """
    variable = os.environ.get("PYTHONSAFEPATH")
    finders = find_user_modules()
    if not {"", os.getcwd()} & set(sys.path):
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        for finder in finders:  # and no others, such as one that a package has added meanwhile
            sys.meta_path.remove(finder)
        os.environ.pop("PYTHONSAFEPATH", None)
        if variable is not None:
            os.environ["PYTHONSAFEPATH"] = variable


def import_object(path: str) -> Any:
    """Import the object at ``package.module.Name``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
