"""Import the user's own classes from the working directory, and nothing else from there.

If the working directory were on ``sys.path``, a file ``wandb.py`` in it would run as soon as any library looks for the
optional package of that name. Here, only modules that the user names are found in it. The packages of this project come
first: a folder ``callbacks`` of the user's hides none of them, even if its parent is on ``sys.path`` or ``PYTHONPATH``.
"""

import importlib
import multiprocessing.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from typing_extensions import override

_IMPORTERS = {__name__, "jsonargparse._util", "multiprocessing.spawn"}
"""Modules that import classes the user names: this one, the parser of options and configs, and worker processes."""


_OWN_PACKAGES = ("benchmarks", "callbacks", "datamodules", "lightning_modules")
_OWN_FOLDER = str(Path(__file__).parents[2])


class OwnPackages(MetaPathFinder):
    """Finder for the packages of this project, before those of other folders with their names."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in _OWN_PACKAGES:
            return None
        return PathFinder.find_spec(fullname, [_OWN_FOLDER], target)


class UserModules(MetaPathFinder):
    """Finder for modules of one folder that the user names, and for the modules that these import.

    Installed modules take precedence.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._found: set[str] = set()

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
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
    """Make modules of the working directory importable by name, but not instead of the packages of this project."""
    own, users = OwnPackages(), UserModules(Path.cwd())
    sys.meta_path.insert(0, own)
    sys.meta_path.append(users)
    return own, users


@contextmanager
def user_modules() -> Iterator[None]:
    """Make modules of the working directory importable by name within the block, and keep it off ``sys.path``.

    Python puts the working directory first on the path of processes started with ``-c``, as multiprocessing does. These
    get the option ``-P``, which prevents that; other processes, such as scripts of a callback, do not change. If the
    folder is on the path of this process (``python -m``), it stays on theirs.
    """
    finders = find_user_modules()
    options = multiprocessing.util._args_from_interpreter_flags  # type: ignore[attr-defined]
    if not {"", os.getcwd()} & set(sys.path):
        multiprocessing.util._args_from_interpreter_flags = lambda: [*options(), "-P"]  # type: ignore[attr-defined]
    if sys.flags.safe_path:  # Lightning starts the other processes of a run without this process's options
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
        multiprocessing.util._args_from_interpreter_flags = options  # type: ignore[attr-defined]


def import_object(path: str) -> Any:
    """Import the object at ``package.module.Name``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
