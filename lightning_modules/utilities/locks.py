"""Locks between processes, on one machine or several: leases of `filelock` that end with their holder.

A lock is a small file that names its holder (host, process, start) and is touched every two seconds. A process of this
machine loses it when it ends, one of another machine after two minutes without a touch, by the clock of whoever waits.
So neither moved clocks nor file systems without ``flock`` matter.
"""

import functools
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

from lightning_modules.utilities.files import BUILDING

LEASE = 120.0
"""Seconds without a touch after which a holder on another machine has ended; NFS may show a touch a minute late."""

HEARTBEAT = 2.0
"""Seconds between two touches."""

_SUFFIX = ".lock"
_POLL = 0.05

_log = logging.getLogger(__name__)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Wait until no other process works on a file or folder, and keep others waiting meanwhile.

    What dead processes have left beside the target is removed first. A holder that was suspended for minutes may find
    that another process has done its work; publishing in one step makes that harmless.
    """
    path = target.parent / f".{target.name}{_SUFFIX}"
    # Called while waiting: warns once.
    warn = functools.cache(lambda: _log.warning("Waiting for %s, which prepares %s.", _holder(path), target.name))
    with _lease(path).acquire(cancel_check=lambda: bool(warn())):
        _remove_unfinished(target)
        for other in target.parent.glob(f".*{_SUFFIX}"):
            if other != path:
                with suppress(OSError, Timeout), _lease(other).acquire(timeout=0.1):  # its holder is dead
                    _remove_unfinished(other.with_name(other.stem[1:]))
        yield


def _remove_unfinished(target: Path) -> None:
    """Remove the unfinished folders of a target, whose lock this process holds."""
    for folder in target.parent.glob(f"{BUILDING}{target.name}@*"):
        _log.info("Removing %s, left by a process that died.", folder)
        shutil.rmtree(folder, ignore_errors=True)


class RunLock:
    """Folders that the processes of one run write to; the next run begins when the last of them has ended.

    The first process keeps other runs out. Every other process holds a lock of its own: after a kill of the first one
    the others live for some seconds, and may still write.

    Args:
        folders: Local folders that exist and are writable.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._leases: list[SoftFileLease] = []

    def begin(self, patience: float = LEASE + 30) -> None:
        """Take the folders, in the first process of a run.

        A live holder is refused within seconds. For ``patience`` seconds it waits for what may have died elsewhere, and
        for the other processes of a run whose first one died.

        Raises:
            ValueError: If another run is using a folder; the message names its process.
        """
        leftovers = RunLock()
        try:
            own = self._paths(0)
            self._take(own, patience, refuse_live=True)
            others = [path for folder in self._folders for path in folder.glob(_rank_file("*")) if path not in own]
            leftovers._take(others, patience, refuse_live=False)
        except BaseException:
            self.leave()
            raise
        finally:
            leftovers.leave()

    def join(self, rank: int) -> None:
        """Take part in the run, in every process, once the first one has begun."""
        if rank > 0 and not self._leases:
            self._take(self._paths(rank), LEASE + 30, refuse_live=False)

    def leave(self) -> None:
        """Write nothing from now on."""
        while self._leases:
            self._leases.pop().release()

    def _paths(self, rank: int) -> list[Path]:
        return [folder / _rank_file(rank) for folder in self._folders]

    def _take(self, paths: list[Path], patience: float, *, refuse_live: bool) -> None:
        # One after the other: of two runs that start at once, the one that gets the first folder gets them all.
        for path in paths:
            watch = _Watch(path)
            deadline = time.monotonic() + patience
            while not watch.take():
                if (watch.lives() and refuse_live) or time.monotonic() > deadline:
                    raise ValueError(
                        f"'{path.parent}' is in use by {_holder(path)}. Wait for its end, or give this run a folder of"
                        f" its own. If that process is gone, or works in another copy of the folder, delete '{path}'."
                    )
                time.sleep(_POLL)
            self._leases.append(watch.lease)


def _rank_file(rank: int | str) -> str:
    return f".rank-{rank}{_SUFFIX}"


class _Watch:
    """A lock that may have a holder."""

    def __init__(self, path: Path) -> None:
        self.lease = _lease(path, self._lost)
        self._path = path
        self._first: tuple[str | None, int] | None = None

    def take(self) -> bool:
        """Take the lock if it is free, or its holder has ended."""
        try:
            self.lease.acquire(timeout=0)
        except Timeout:
            return False
        with self._path.open("a") as file:  # filelock ignores lines that it does not know
            file.write(f"since={time.strftime('%Y-%m-%d %H:%M:%S %z')}\n")
        return True

    def _lost(self, compromise: LeaseCompromise) -> None:
        """Take a deleted lock again; stop this process before two runs write to a folder."""
        if compromise.reason == "refresh-failed":
            _log.warning("Cannot touch %s (%s): others may take this run for dead.", self._path, compromise.error)
            return
        if compromise.reason == "marker-missing":
            self.lease.release()
            if self.take():
                _log.warning("%s was deleted: taken again, as this run is still writing.", self._path)
                return
        os.write(2, f"longce: error: '{self._path.parent}' was taken over by {_holder(self._path)}.\n".encode())
        os._exit(1)

    def lives(self) -> bool:
        """Whether the holder is known to live, after an attempt to take the lock."""
        owner = self.lease.owner
        if owner is None:
            return False
        if owner.hostname == socket.gethostname():  # the attempt would have replaced a dead process of this machine
            return True
        with suppress(FileNotFoundError):
            beat = (owner.token, self._path.stat().st_mtime_ns)
            if self._first is None or self._first[0] != owner.token:
                self._first = beat
                _log.warning("%s holds %s: waiting for a sign of life.", _holder(self._path), self._path.parent)
            return beat != self._first
        return False


def _lease(path: Path, lost: Callable[[LeaseCompromise], None] | None = None) -> SoftFileLease:
    # Not thread-local: a deleted lock is taken again by the thread that notices.
    return SoftFileLease(
        path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, on_compromise=lost, thread_local=False
    )


def _holder(path: Path) -> str:
    found: dict[str, str] = {}
    with suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        found = dict(line.split("=", 1) for line in lines if "=" in line)
    since = f" since {found['since']}" if "since" in found else ""
    return f"process {found['pid']} on {found['host']}{since}" if {"pid", "host"} <= found.keys() else "another process"
