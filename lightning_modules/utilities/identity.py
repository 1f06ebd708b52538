"""Identity by content: the SHA-256 of all bytes, computed once per file and memoized on disk.

Paths, sizes, inodes and times are never the identity; they only show whether a memoized hash is still valid.
"""

import hashlib
import json
import logging
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_modules.utilities.files import default_cache_dir, writable_folder, write_atomically
from lightning_modules.utilities.locks import exclusive

SETTLING_TIME = 2_000_000_000
"""Minimum age in nanoseconds at which the times of a file are trusted. If a file changes twice within one tick of the
file system's clock, the second change does not change its times; the coarsest tick in use is 2 s (FAT)."""

_LOGGED_SIZE = 1 << 30  # bytes; hashing less takes about a second
_STORE_INTERVAL = 10.0  # seconds between writes of the memo

_log = logging.getLogger(__name__)


def file_hashes(files: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each file's bytes in the order of the files, as ``sha256sum`` prints it.

    Hashes are memoized by path, size, inode and times in ``$LONGCE_CACHE/identity`` or ``~/.cache/longce/identity``. If
    several processes need the same hashes, one computes them and the others read them from its memo.

    Raises:
        ValueError: If a path is not a regular file, a file changes while it is hashed, or the memo cannot be written.
    """
    paths = [os.path.realpath(file) for file in files]
    if not paths:
        return []
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    memo = default_cache_dir() / "identity" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()}.json"
    hashes = _read_valid_hashes(memo, paths)
    if len(hashes) < len(set(paths)):
        writable_folder(memo.parent, remedy="Set $LONGCE_CACHE to a writable folder.")
        with exclusive(memo):
            hashes = _read_valid_hashes(memo, paths)  # the process that held the lock may have hashed them
            hashes |= _hash_and_memoize(memo, sorted(set(paths) - hashes.keys()))
    return [hashes[path] for path in paths]


def content_hash(path: Path, files: Iterable[Path] | None = None) -> str:
    """Return the SHA-256 of a file, or one hash of the names and bytes of files in a folder, by default all."""
    if not path.is_dir():
        return file_hashes([path])[0]
    chosen = [file for file in (path.rglob("*") if files is None else files) if not file.is_dir()]
    names = [file.relative_to(path).as_posix() for file in chosen]
    return combined_hash(dict(zip(names, file_hashes(chosen), strict=True)))


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def shorten_hashes(text: str) -> str:
    """Shorten SHA-256 hashes in a text to their first 8 digits, for readers.

    Example:
        >>> shorten_hashes(f"sha256:{64 * 'e'}")
        'sha256:eeeeeeee'
    """
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", text)


def combined_hash(values: Any) -> str:
    """Compute one SHA-256 of plain values such as hashes, names and settings. The order of mappings is ignored."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def file_state(path: str | Path) -> list[int]:
    """Return size, inode, modification time and change time of a file, which show whether it may have changed.

    They are not its identity: a second change within one tick of the file system's clock is missed, see
    `SETTLING_TIME`.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"'{path}' is not a regular file, so it cannot be identified by content. Use a file.")
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read_valid_hashes(memo: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the memoized hashes of files that have not changed since."""
    entries = _read_memo(memo)
    hashes = {}
    for path in set(paths) & entries.keys():
        *state, digest = entries[path]
        if state == file_state(path):
            hashes[path] = digest
    return hashes


def _read_memo(memo: Path) -> dict[str, list[Any]]:
    """Return state and hash by path; {} if the memo is missing or damaged."""
    try:
        return dict(json.loads(memo.read_bytes()))
    except (OSError, ValueError):
        return {}


def _hash_and_memoize(memo: Path, paths: list[str]) -> dict[str, str]:
    """Hash files in parallel, and memoize the hashes of those that have not changed recently."""
    if not paths:
        return {}
    size = sum(file_state(path)[0] for path in paths)
    if size >= _LOGGED_SIZE:
        _log.info("Hashing %d files (%.1f GB) once, the first of them %s.", len(paths), size / 1e9, paths[0])
    started = time.time_ns()
    stored_at = time.monotonic()
    stop = threading.Event()
    pool = ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1))
    futures = [pool.submit(_hash_file, path, stop) for path in paths]
    try:
        for future in as_completed(futures):
            future.result()
            if time.monotonic() - stored_at > _STORE_INTERVAL:  # a killed process keeps these
                _memoize(memo, _finished_entries(futures), started)
                stored_at = time.monotonic()
    finally:  # after Ctrl-C or an unreadable file, keep the finished hashes and do not wait for the others
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        entries = _finished_entries(futures)
        _memoize(memo, entries, started)
    return {path: entry[-1] for path, entry in entries.items()}


def _finished_entries(futures: Iterable[Future[tuple[str, list[Any]]]]) -> dict[str, list[Any]]:
    entries = {}
    for future in futures:
        if future.done() and not future.cancelled() and future.exception() is None:
            path, entry = future.result()
            entries[path] = entry
    return entries


def _memoize(memo: Path, entries: dict[str, list[Any]], started: int) -> None:
    """Add the entries of files whose times were settled when hashing ``started``, in nanoseconds."""
    # A modification time far in the future was set on purpose; the change time never is.
    settled = {
        path: entry
        for path, entry in entries.items()
        if entry[3] < started - SETTLING_TIME and abs(started - entry[2]) > SETTLING_TIME
    }
    if not settled:
        return
    try:
        write_atomically(memo, json.dumps(_read_memo(memo) | settled).encode())
    except OSError as error:  # the hashes are known, and must not be lost with the work that needs them
        _log.warning(
            "Hashes cannot be stored in %s (%s): set $LONGCE_CACHE to another disk.", memo.parent, error.strerror
        )


def _hash_file(path: str, stop: threading.Event) -> tuple[str, list[Any]]:
    """Return the path of a file, and its state with the SHA-256 of its bytes."""
    state = file_state(path)
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(1 << 20):
            if stop.is_set():
                raise InterruptedError(0, "hashing was stopped")  # never the hash of a part
            digest.update(chunk)
    if file_state(path) != state:
        raise ValueError(f"'{path}' changed while it was hashed. Wait for other writers to finish, and start again.")
    return path, [*state, digest.hexdigest()]


def package_version(name: str) -> str:
    """Return a package's version; "unknown" for modules of a folder that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
