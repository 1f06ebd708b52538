"""Output folder, local or at an fsspec URL, whose files are written atomically."""

import io
import uuid
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import fsspec

from lightning_modules.utilities.files import BUILDING, remove_unfinished, write_atomically


class OutputFolder:
    """Folder without subfolders, at an fsspec URL or at the local path ``local``; it need not exist."""

    def __init__(self, path: str) -> None:
        self.path = path
        local = "://" not in path or path.startswith("file://")
        self.local = Path(path.removeprefix("file://")).expanduser() if local else None
        try:
            self._system, self._root = fsspec.url_to_fs(path if self.local is None else str(self.local))
        except (ImportError, ValueError) as error:
            raise ValueError(f"Cannot write to '{path}': {error}. Correct the URL, or install the package.") from error

    def __str__(self) -> str:
        return self.path

    def check_writable(self) -> None:
        """Create the folder if needed, and raise a ``ValueError`` if it is not writable."""
        probe = f"{self._root}/{BUILDING}{uuid.uuid4().hex}"
        try:
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(probe, b"")  # only writing shows whether one may write
            self._system.rm_file(probe)
        except Exception as error:  # each file system raises its own errors
            raise ValueError(
                f"Cannot write to '{self.path}' ({error}). Check the URL and your access rights."
            ) from error

    def names(self, ending: str) -> list[str]:
        """Return the sorted names of finished files with this ending, except names that start with ``_``."""
        self._system.invalidate_cache()  # other processes write to the folder as well
        try:
            found = [PurePosixPath(path).name for path in self._system.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(ending) and not name.startswith((".", "_")))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading bytes."""
        return cast(BinaryIO, io.BufferedReader(self._system.open(f"{self._root}/{name}", "rb")))

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        if self.local is not None:
            write_atomically(self.local / name, content)
            return
        # Object stores write whole objects, but others, such as SFTP, show a file while it grows.
        temporary = f"{self._root}/{BUILDING}{name}@{uuid.uuid4().hex}"
        self._system.pipe_file(temporary, content)
        self._system.mv(temporary, f"{self._root}/{name}")

    def remove_unfinished(self) -> None:
        """Remove unfinished files of killed processes from a local folder; no process may be writing to it."""
        if self.local is not None:
            remove_unfinished(self.local)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{name}")
