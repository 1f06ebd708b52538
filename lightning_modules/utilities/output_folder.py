"""A folder of results, on this machine or at an fsspec URL, whose files appear whole or not at all."""

import io
import uuid
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import fsspec

from lightning_modules.utilities.files import BUILDING, remove_unfinished, write_atomically


class OutputFolder:
    """Files of one folder, without subfolders: local (then also ``local``) or at an fsspec URL; it need not exist."""

    def __init__(self, path: str) -> None:
        self.path = path
        local = "://" not in path or path.startswith("file://")
        self.local = Path(path.removeprefix("file://")).expanduser() if local else None
        try:
            self._system, self._root = fsspec.url_to_fs(path if self.local is None else str(self.local))
        except (ImportError, ValueError) as error:
            raise ValueError(f"Cannot write to '{path}': {error}. Correct the address, or install it.") from error

    def __str__(self) -> str:
        return self.path

    def check_writable(self) -> None:
        """Raise a ``ValueError`` if nothing can be written there; makes the folder if needed."""
        probe = f"{self._root}/{BUILDING}{uuid.uuid4().hex}"
        try:
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(probe, b"")
            self._system.rm_file(probe)
        except Exception as error:  # each file system has its own
            raise ValueError(f"Cannot write to '{self.path}' ({error}). Check the address and your rights.") from error

    def names(self, ending: str) -> list[str]:
        """Return the sorted names of the finished files with that ending that do not start with ``_``."""
        self._system.invalidate_cache()
        try:
            found = [PurePosixPath(path).name for path in self._system.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(ending) and not name.startswith((".", "_")))

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes."""
        return cast(BinaryIO, io.BufferedReader(self._system.open(f"{self._root}/{name}", "rb")))

    def write(self, name: str, content: bytes) -> None:
        """Write a file of which a reader sees all or nothing, also after a kill."""
        if self.local is not None:
            write_atomically(self.local / name, content)
            return
        temporary = f"{self._root}/{BUILDING}{name}@{uuid.uuid4().hex}"
        self._system.pipe_file(temporary, content)
        self._system.mv(temporary, f"{self._root}/{name}")

    def remove_unfinished(self) -> None:
        """Remove what killed processes have left in a local folder to which no process writes now."""
        if self.local is not None:
            remove_unfinished(self.local)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")
