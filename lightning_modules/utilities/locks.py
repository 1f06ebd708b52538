"""Locks between processes, on one machine or several: leases of `filelock` that end with their holder.

A lock is a small file that names its holder (host, process, start) and is touched every two seconds. It expires when a
holder on this machine ends, and for a holder on another machine after two minutes without a touch, measured by the
waiting process. It needs neither synchronized clocks nor file systems with ``flock``.
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
"""Seconds without a touch after which a holder on another machine counts as dead. NFS may delay a touch by a minute."""

HEARTBEAT = 2.0
"""Seconds between touches."""

_SUFFIX = ".lock"
_POLL = 0.05

_log = logging.getLogger(__name__)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of a file or folder, after waiting until no other process works on it.

    Unfinished files of dead processes are removed first. If a holder is suspended for minutes, another process may take
    over and finish first, which is harmless because both publish atomically.
    """
    path = target.parent / f".{target.name}{_SUFFIX}"
    lease = _make_lease(path)
    # Called while waiting: warns once.
    warn = functools.cache(
        lambda: _log.warning("Waiting for %s, which prepares %s.", _describe_holder(lease), target.name)
    )
    with lease.acquire(cancel_check=lambda: bool(warn())):
        remove_unfinished(target.parent, target.name)
        for other in target.parent.glob(f".*{_SUFFIX}"):
            if other != path:
                with suppress(OSError, Timeout), _make_lease(other).acquire(timeout=0.1):  # only if its holder is dead
                    remove_unfinished(other.parent, other.stem[1:])
        yield


class RunLock:
    """Lock on the folders that the processes of one run write to; the next run begins when the last of them has ended.

    The folders must exist and be local. The first process excludes other runs. Every other process has an additional
    lock: if the first process is killed, the others live for some seconds and may still write.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._leases: list[SoftFileLease] = []

    def begin(self, patience: float = LEASE + 30) -> None:
        """Lock the folders, in the first process of a run.

        If the holder is alive, a ``ValueError`` names it within seconds. Otherwise wait up to ``patience`` seconds for
        locks of processes that may have died on other machines, and for the other processes of a killed run.
        """
        leftovers = RunLock()
        try:
            own = self._rank_paths(0)
            self._acquire_locks(own, patience, refuse_live=True)
            others = [path for folder in self._folders for path in folder.glob(_rank_file("*")) if path not in own]
            leftovers._acquire_locks(others, patience, refuse_live=False)
        except BaseException:
            self.leave()
            raise
        finally:
            leftovers.leave()

    def join(self, rank: int) -> None:
        """Join the run, in every process, after the first one has begun."""
        if rank > 0 and not self._leases:
            self._acquire_locks(self._rank_paths(rank), LEASE + 30, refuse_live=False)

    def leave(self) -> None:
        """Release the folders; this process must not write to them afterwards."""
        while self._leases:
            self._leases.pop().release()

    def _rank_paths(self, rank: int) -> list[Path]:
        return [folder / _rank_file(rank) for folder in self._folders]

    def _acquire_locks(self, paths: list[Path], patience: float, *, refuse_live: bool) -> None:
        # One by one: if two runs start at the same time, the one that locks the first folder gets all of them.
        for path in paths:
            lease = _run_lease(path)
            beats: set[int] = set()
            lives = functools.partial(_is_alive, lease, path, beats)
            try:
                lease.acquire(timeout=patience, poll_interval=_POLL, cancel_check=lives if refuse_live else None)
            except Timeout as error:
                raise ValueError(
                    f"'{path.parent}' is in use by {_describe_holder(lease)}. Wait until it ends, or use another folder"
                    f" for this run. If that process is gone, or works in another copy of the folder, delete '{path}'."
                ) from error
            self._leases.append(lease)


def _rank_file(rank: int | str) -> str:
    return f".rank-{rank}{_SUFFIX}"


def _is_alive(lease: SoftFileLease, path: Path, beats: set[int]) -> bool:
    """Return whether the holder of a lock is known to be alive; called after every attempt to acquire it."""
    owner = lease.owner
    if owner is None:
        return False
    if owner.hostname == socket.gethostname():  # on this machine, the attempt succeeds if the holder is dead
        return True
    if not beats:
        _log.warning("%s holds the lock of %s: checking whether it is alive.", _describe_holder(lease), path.parent)
    with suppress(FileNotFoundError):
        beats.add(path.stat().st_mtime_ns)
    return len(beats) > 1


def _run_lease(path: Path) -> SoftFileLease:
    """Return the lease of a run, which ends this process before two runs write to a folder."""

    def lost(compromise: LeaseCompromise) -> None:
        if compromise.reason == "refresh-failed":
            _log.warning("Cannot touch %s (%s): other runs may consider this run dead.", path, compromise.error)
            return
        if compromise.reason == "marker-missing":
            lease.release()
            with suppress(Timeout):
                lease.acquire(timeout=0)
                _log.warning("%s was deleted: locked again, because this run is still writing.", path)
                return
        os.write(2, f"longce: error: '{path.parent}' was taken over by {_describe_holder(lease)}.\n".encode())
        os._exit(1)

    lease = _make_lease(path, lost)
    return lease


def _make_lease(path: Path, lost: Callable[[LeaseCompromise], None] | None = None) -> SoftFileLease:
    # Not thread-local: the thread that notices a deleted lock acquires it again.
    return SoftFileLease(
        path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, on_compromise=lost, thread_local=False
    )


def _describe_holder(lease: SoftFileLease) -> str:
    owner = lease.owner
    return "another process" if owner is None else f"process {owner.pid} on {owner.hostname}"
