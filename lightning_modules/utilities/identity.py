"""Identity by content: the SHA-256 of all bytes, computed once per file and memoized on disk.

Paths, sizes, times and inodes are never the identity; they only show whether a memoized hash is still valid, together
with a sample of the bytes. A change that keeps all of them is missed: on Linux file systems and NFS no program can set
the change time (ctime), but some others (FUSE mounts of object stores) do not keep one, and a program that writes
through a shared memory map may change a page long after the time that its first write has set. The sample shows changes
of a whole tensor, but not of a few bytes between its blocks.
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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_modules.utilities.files import default_cache_dir, write_atomically
from lightning_modules.utilities.locks import exclusive

_READER_THREADS = 16

SETTLING_TIME = 2_000_000_000
"""Age in nanoseconds from which the times of a file are trusted. If a file changes twice within one tick of the file
system's clock, the second change does not show in them, and the coarsest tick in use is 2 s (FAT)."""

_SAMPLE_BLOCKS, _SAMPLE_BLOCK = 32, 4096  # blocks spread evenly over a file, and bytes of each

_LOGGED_SIZE = 1 << 30  # bytes; hashing less takes about a second
_STORE_INTERVAL = 10.0  # seconds between writes of the memo


_unstored: dict[str, list[Any]] = {}
"""Memo entries that could not be written, so that this process does not hash the same files again."""

_log = logging.getLogger(__name__)


def file_hashes(files: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each file's bytes in the order of the files, as ``sha256sum`` prints it.

    Files are hashed in parallel, one thread each. If several processes need the same hashes, one computes them and the
    others read them from its memo, in ``$LONGCE_CACHE/identity`` or ``~/.cache/longce/identity``.
    """
    paths = [os.path.realpath(file) for file in files]
    if not paths:
        return []
    memo = _memo_path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    found = _read_valid_hashes(memo, paths)
    if len(found) < len(set(paths)):
        with ExitStack() as stack:
            try:
                memo.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive(memo))
            except OSError as error:  # hashing twice is slow, but correct
                _log.info("Cannot lock %s (%s): other processes may hash the same files.", memo, error)
            found = _read_valid_hashes(memo, paths)  # the process that held the lock may have hashed them
            found |= _hash_and_memoize(memo, sorted(set(paths) - found.keys()))
    return [found[path] for path in paths]


def content_hash(path: Path, files: Iterable[Path] | None = None) -> str:
    """Return the SHA-256 of a file, or one hash of the names and bytes of files in a folder, by default all."""
    if not path.is_dir():
        return file_hashes([path])[0]
    chosen = [file for file in (path.rglob("*") if files is None else files) if not file.is_dir()]
    names = [file.relative_to(path).as_posix() for file in chosen]
    return combined_hash(dict(zip(names, file_hashes(chosen), strict=True)))


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    with path.open("rb", buffering=0) as file:
        return reduce(lambda crc, block: zlib.crc32(block, crc), iter(lambda: file.read(1 << 20), b""), 0)


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


def _sample_crc32(path: str, size: int) -> int:
    """Return the CRC-32 of blocks spread evenly over a file, from its first to its last bytes."""
    crc, last = 0, max(0, size - _SAMPLE_BLOCK)
    with open(path, "rb", buffering=0) as file:
        if size <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK:
            return zlib.crc32(file.read())
        for number in range(_SAMPLE_BLOCKS):
            file.seek(last * number // (_SAMPLE_BLOCKS - 1))
            crc = zlib.crc32(file.read(_SAMPLE_BLOCK), crc)
    return crc


def _hash_and_memoize(memo: Path, paths: list[str]) -> dict[str, str]:
    """Hash files, and memoize the hashes of those that have not changed recently."""
    if not paths:
        return {}
    size = sum(file_state(path)[0] for path in paths)
    if size >= _LOGGED_SIZE:
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        _log.info("Hashing %s%s (%.1f GB) once.", paths[0], others, size / 1e9)
    hashes: dict[str, str] = {}
    settled: dict[str, list[Any]] = {}
    stop, stored_at = threading.Event(), time.monotonic()
    pool = ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1))
    try:
        for future in as_completed([pool.submit(_hash_file, path, stop) for path in paths]):
            path, state, hashes[path], is_settled = future.result()
            if is_settled:
                settled[path] = [*state, _sample_crc32(path, state[0]), hashes[path]]
            if time.monotonic() - stored_at > _STORE_INTERVAL:
                _memoize_hashes(memo, settled)
                stored_at = time.monotonic()
    finally:  # after Ctrl-C or an unreadable file, keep the finished hashes and do not wait for the others
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        _memoize_hashes(memo, settled)
    return hashes


def _hash_file(path: str, stop: threading.Event) -> tuple[str, list[int], str, bool]:
    """Return path, state and SHA-256 of a file, and whether its times are old enough to detect a later change."""
    state, started, digest = file_state(path), time.time_ns(), hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            while chunk := stream.read(1 << 20):
                if stop.is_set():
                    raise InterruptedError(0, "hashing was stopped")  # never the hash of a part
                digest.update(chunk)
    except OSError as error:  # an error of reading does not name the file
        raise ValueError(
            f"'{path}' cannot be read ({error.strerror}). Check the path, your access rights and whether the disk is"
            " mounted."
        ) from error
    if file_state(path) != state:
        raise ValueError(f"'{path}' changed while it was hashed. Wait until nothing writes to it and start again.")
    _, _, modified, changed = state
    # A modification time far in the future was set on purpose; the change time never is.
    is_settled = changed < started - SETTLING_TIME and abs(started - modified) > SETTLING_TIME
    return path, state, digest.hexdigest(), is_settled


def _memo_path(folder: str) -> Path:
    try:
        cache = default_cache_dir()
    except RuntimeError:  # without a home directory, no folder can be created below this path; a warning follows
        cache = Path(os.devnull)
    return cache / "identity" / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()}.json"


def _read_valid_hashes(memo: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the memoized hashes of files that have not changed since."""
    entries = {**_unstored, **_read_memo(memo)}
    known = list(set(paths) & entries.keys())
    with ThreadPoolExecutor(_READER_THREADS) as pool:  # reading is mostly waiting
        same = list(pool.map(lambda path: _is_unchanged(path, entries[path]), known))
    return {path: entries[path][-1] for path, unchanged in zip(known, same, strict=True) if unchanged}


def _is_unchanged(path: str, entry: list[Any]) -> bool:
    *known, sample, _ = entry
    return known == (state := file_state(path)) and sample == _sample_crc32(path, state[0])


def _read_memo(memo: Path) -> dict[str, list[Any]]:
    """Return state and hash by path from a memo, without damaged entries."""
    try:
        entries = dict(json.loads(memo.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return {path: entry for path, entry in entries.items() if isinstance(entry, list) and len(entry) == 6}


def _memoize_hashes(memo: Path, entries: Mapping[str, list[Any]]) -> None:
    if not entries:
        return
    try:
        write_atomically(memo, json.dumps({**_read_memo(memo), **entries}).encode())
    except OSError as error:
        if not _unstored:
            _log.warning(
                "Content hashes cannot be stored in %s (%s), so every process hashes these files again. Set"
                " $LONGCE_CACHE to a writable folder.",
                memo.parent,
                error.strerror,
            )
        _unstored.update(entries)


def package_version(name: str) -> str:
    """Return a package's version; "unknown" for modules of a folder that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
