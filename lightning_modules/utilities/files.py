"""Files and folders that appear whole or not at all, and the cache they live in."""

import ctypes
import errno
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def default_cache_dir() -> Path:
    """Return ``$LONGCE_CACHE``, or ``~/.cache/longce``."""
    return Path(os.environ.get("LONGCE_CACHE") or "~/.cache/longce").expanduser()


BUILDING = ".building-"
"""Prefix of the names of all unfinished files and folders, which are never read."""

CACHE_REMEDY = "Set `cache_dir`, or $LONGCE_CACHE, to a folder that you can write to."

_log = logging.getLogger(__name__)


def writable_folder(folder: Path, *, remedy: str = CACHE_REMEDY) -> Path:
    """Make a folder if needed and write to it once; a ``ValueError`` that ends with ``remedy`` reports a failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"Cannot write to the folder {folder} ({error.strerror}). {remedy}") from error
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file beside its target, flush it to disk and put it in place in one step."""
    with atomic_file(path) as stream:
        stream.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file beside ``path``, which takes its name, flushed to disk, when the block ends.

    A failure leaves what was there; a killed process also leaves a file ``.building-*``, which is never read.
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def create_file(folder: Path, prefix: str, suffix: str = "") -> tuple[int, Path]:
    """Create a file of a new name with the permissions of the umask, and return its descriptor and path."""
    path = folder / f"{prefix}{secrets.token_hex(8)}{suffix}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path


def create_folder(target: Path) -> Path:
    """Create an unfinished folder for ``target`` beside it, with the permissions that the umask leaves."""
    folder = target.with_name(f"{building_prefix(target)}{secrets.token_hex(8)}")
    folder.mkdir(parents=True)
    return folder


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``, which takes its name when the block ends.

    A failure leaves nothing. A killed process leaves a folder ``.building-*``, which is never read and which the next
    holder of the lock of ``target`` removes (see `locks.exclusive`). A folder that exists already is kept, as equal
    names promise equal content, or exchanged with ``replace``.
    """
    temporary = create_folder(target)
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            to_disk(path)
        publish_folder(temporary, target, replace=replace)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.add_note(f"No room for {target}. Free some, or set `cache_dir` or $LONGCE_CACHE to another disk.")
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, target: Path, *, replace: bool) -> None:
    """Give a complete folder its name, in one step; ``temporary`` is then gone, or to be removed."""
    if replace and target.is_dir():
        _exchange(temporary, target)
    else:
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    to_disk(target.parent)


def building_prefix(target: Path) -> str:
    """Return the prefix of the names of unfinished files and folders for ``target``."""
    return f"{BUILDING}{target.name}@"


def remove_folder(target: Path) -> None:
    """Remove a folder in one step: a process killed meanwhile leaves an unfinished folder, never half a target."""
    doomed = create_folder(target)
    target.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Remove what killed processes have left for targets of a name in a folder; no process may be writing them."""
    for path in folder.glob(f"{BUILDING}{name}@*"):
        _log.info("Removing %s, left by a process that died.", path)
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _exchange(first: Path, second: Path) -> None:
    """Swap the names of two folders, in one step where the system can, so that a kill leaves one of both in place."""
    at_working_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (at_working_directory, os.fsencode(first), at_working_directory, os.fsencode(second), exchange)
    if rename is not None and rename(*names) == 0:
        return
    aside = first.with_name(f"{first.name}.old")  # macOS, and file systems that cannot
    second.rename(aside)
    try:
        first.rename(second)
    except OSError:
        aside.rename(second)
        raise
    aside.rename(first)


def to_disk(path: Path) -> None:
    """Wait until the file or folder would survive a power cut: a rename may otherwise outrun the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
