"""Locks between processes, on one machine or several: leases of `filelock` that end with their holder.

A lock is a small file that names its holder (host, process, start) and is touched every two seconds. A process of this
machine loses it when it ends, one of another machine after two minutes without a touch, by the clock of whoever waits.
So neither moved clocks nor file systems without ``flock`` matter.
"""

import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

from lightning_modules.utilities.files import remove_unfinished

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
    its work done by another process, which is harmless as both publish in one step.
    """
    path = target.parent / f".{target.name}{_SUFFIX}"
    lease = _lease(path)
    # Called while waiting: warns once.
    warn = functools.cache(lambda: _log.warning("Waiting for %s, which prepares %s.", _holder(lease), target.name))
    with lease.acquire(cancel_check=lambda: bool(warn())):
        remove_unfinished(target.parent, target.name)
        for other in target.parent.glob(f".*{_SUFFIX}"):
            if other != path:
                with suppress(OSError, Timeout), _lease(other).acquire(timeout=0.1):  # its holder is dead
                    remove_unfinished(other.parent, other.stem[1:])
        yield


class RunLock:
    """Folders that the processes of one run write to; the next run begins when the last of them has ended.

    The folders exist and are local. The first process keeps other runs out. Every other process holds a lock of its
    own: after a kill of the first one the others live for some seconds, and may still write.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._leases: list[SoftFileLease] = []

    def begin(self, patience: float = LEASE + 30) -> None:
        """Take the folders, in the first process of a run.

        A live holder is refused within seconds, by a ``ValueError`` that names it. For ``patience`` seconds it waits
        for what may have died elsewhere, and for the other processes of a run whose first one died.
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
            lease = _run_lease(path)
            beats: set[int] = set()
            lives = functools.partial(_lives, lease, path, beats)
            try:
                lease.acquire(timeout=patience, poll_interval=_POLL, cancel_check=lives if refuse_live else None)
            except Timeout as error:
                raise ValueError(
                    f"'{path.parent}' is in use by {_holder(lease)}. Wait for its end, or give this run a folder of"
                    f" its own. If that process is gone, or works in another copy of the folder, delete '{path}'."
                ) from error
            self._leases.append(lease)


def _rank_file(rank: int | str) -> str:
    return f".rank-{rank}{_SUFFIX}"


def _lives(lease: SoftFileLease, path: Path, beats: set[int]) -> bool:
    """Whether the holder of a lock is known to live, after an attempt to take it: asked again and again."""
    if (owner := lease.owner) is None:
        return False
    if owner.hostname == socket.gethostname():  # the attempt would have replaced a dead process of this machine
        return True
    if not beats:
        _log.warning("%s holds %s: waiting for a sign of life.", _holder(lease), path.parent)
    with suppress(FileNotFoundError):
        beats.add(path.stat().st_mtime_ns)
    return len(beats) > 1


def _run_lease(path: Path) -> SoftFileLease:
    """Return the lease of a run, which ends this process before two runs write to a folder."""

    def lost(compromise: LeaseCompromise) -> None:
        if compromise.reason == "refresh-failed":
            _log.warning("Cannot touch %s (%s): others may take this run for dead.", path, compromise.error)
            return
        if compromise.reason == "marker-missing":
            lease.release()
            with suppress(Timeout):
                lease.acquire(timeout=0)
                _log.warning("%s was deleted: taken again, as this run is still writing.", path)
                return
        os.write(2, f"longce: error: '{path.parent}' was taken over by {_holder(lease)}.\n".encode())
        os._exit(1)

    lease = _lease(path, lost)
    return lease


def _lease(path: Path, lost: Callable[[LeaseCompromise], None] | None = None) -> SoftFileLease:
    # Not thread-local: a deleted lock is taken again by the thread that notices.
    return SoftFileLease(
        path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, on_compromise=lost, thread_local=False
    )


def _holder(lease: SoftFileLease) -> str:
    owner = lease.owner
    return "another process" if owner is None else f"process {owner.pid} on {owner.hostname}"
