"""Atomic files and folders, JSON files, and the cache directory."""

import ctypes
import errno
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def default_cache_dir() -> Path:
    """Return ``$LONGCE_CACHE``, or ``~/.cache/longce``."""
    return Path(os.environ.get("LONGCE_CACHE") or "~/.cache/longce").expanduser()


BUILDING = ".building-"
"""Prefix of the names of all unfinished files and folders, which are never read."""

CACHE_REMEDY = "Set `cache_dir` or $LONGCE_CACHE to a writable folder."

_log = logging.getLogger(__name__)


def writable_folder(folder: Path, *, remedy: str = CACHE_REMEDY) -> Path:
    """Create a folder if needed and check that it is writable; an error message ends with ``remedy``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"Cannot write to the folder {folder} ({error.strerror}). {remedy}") from error
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file next to its target, flush it to disk and move it into place."""
    with atomic_file(path) as stream:
        stream.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file next to ``path``, which replaces ``path``, flushed to disk, when the block ends.

    A failure leaves ``path`` unchanged; a killed process also leaves a file ``.building-*``, which is never read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = create_file(path.parent, building_prefix(path))
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)  # already renamed after a success


def create_file(folder: Path, prefix: str, suffix: str = "") -> tuple[int, Path]:
    """Create a file with a unique name and the umask's permissions, and return its descriptor and path."""
    path = folder / f"{prefix}{secrets.token_hex(8)}{suffix}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


def create_folder(target: Path) -> Path:
    """Create an unfinished folder next to ``target``, with the umask's permissions."""
    folder = target.with_name(f"{building_prefix(target)}{secrets.token_hex(8)}")
    folder.mkdir(parents=True)
    return folder


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``, which is renamed to ``target`` when the block ends.

    A failure leaves nothing. A killed process leaves a folder ``.building-*``, which is never read and which the next
    holder of the lock of ``target`` removes (see `locks.exclusive`). An existing ``target`` is kept, because equal
    names promise equal content; with ``replace`` it is replaced.
    """
    temporary = create_folder(target)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            to_disk(path)
        publish_folder(temporary, target, replace=replace)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.add_note(
                f"The disk is full: {target}. Free space, or set `cache_dir` or $LONGCE_CACHE to another disk."
            )
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, target: Path, *, replace: bool) -> None:
    """Rename a complete folder to ``target`` atomically; ``temporary``, if it still exists, can then be removed."""
    if replace and target.is_dir():
        _swap_folders(temporary, target)
    else:
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    to_disk(target.parent)


def building_prefix(target: Path) -> str:
    """Return the name prefix of unfinished files and folders for ``target``."""
    return f"{BUILDING}{target.name}@"


def remove_folder(target: Path) -> None:
    """Remove a folder atomically: a process killed in between leaves an unfinished folder, never half a target."""
    doomed = create_folder(target)
    target.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove unfinished targets of a name that killed processes left in a folder; no process may be writing them."""
    for path in folder.glob(f"{BUILDING}{name}@*"):
        _log.info("Removing %s, left by a killed process.", path)
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _swap_folders(first: Path, second: Path) -> None:
    """Swap the names of two folders, atomically if the system supports it."""
    at_working_directory = -100  # AT_FDCWD and RENAME_EXCHANGE of Linux
    exchange = 2
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), exchange)
    if rename is not None and rename(*names) == 0:
        return
    aside = first.with_name(f"{first.name}.old")  # macOS, and file systems without this operation
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def to_disk(path: Path) -> None:
    """Flush a file or folder to disk, or a rename could survive a power failure without the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain(value: Any) -> Any:
    """Convert a value for JSON: null for NaN and infinity, objects of named tuples, text for other objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():  # a number; numpy is not imported
        value = value.item()
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Name the file in the error if its content, which is parsed in this context, is damaged."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"'{path}' is damaged ({error}): restore it from a backup, or delete it.") from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, with null for numbers that are not finite."""
    write_atomically(path, (json.dumps(plain(content), indent=1) + "\n").encode())
