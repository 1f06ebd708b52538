"""Locks between processes, on one machine or several: leases of `filelock` that end with their holder.

A lock is a small file that names its holder (host, process, start) and is touched every two seconds. A process of this
machine loses it when it ends, one of another machine after two minutes without a touch, by the clock of whoever waits.
So neither moved clocks nor file systems without ``flock`` matter.
"""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

from lightning_modules.files import BUILDING

LEASE = 120.0
"""Seconds without a touch after which a holder on another machine has ended; NFS may show a touch a minute late."""

HEARTBEAT = 2.0
"""Seconds between two touches."""

_SUFFIX = ".lock"

_log = logging.getLogger(__name__)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Wait until no other process works on the target, and keep others waiting meanwhile.

    What dead processes have left beside the target is removed first. A holder that was suspended for minutes may find
    that another process has done its work; publishing in one step makes that harmless.

    Args:
        target: File or folder to make; its parent folder exists and is writable.
    """
    path = target.parent / f".{target.name}{_SUFFIX}"
    told = False

    def tell() -> bool:
        nonlocal told
        if not told:
            _log.warning("Waiting for %s, which prepares %s.", _holder(path), target.name)
        told = True
        return False

    with _lease(path).acquire(cancel_check=tell):
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
    """A folder that the processes of one run write to; the next run begins when the last of them has ended.

    The first process keeps other runs out. Every other process holds a lock of its own: after a kill of the first one
    the others live for some seconds, and may still write.

    Args:
        folder: A local folder that exists and is writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lease: SoftFileLease | None = None

    def begin(self, patience: float = LEASE + 30) -> None:
        """Take the folder, in the first process of a run.

        A live holder is refused within seconds. What may have died elsewhere, and the other processes of a run whose
        first one died, are waited for.

        Args:
            patience: Seconds to wait.

        Raises:
            ValueError: If another run is using the folder; the message names its process.
        """
        self._take(self._path(0), patience, refuse_live=True)
        try:
            for path in self._folder.glob(self._path("*").name):
                if path != self._path(0):
                    RunLock(self._folder)._outlive(path, patience)
        except BaseException:
            self.leave()
            raise

    def join(self, rank: int) -> None:
        """Take part in the run, in every process, once the first one has begun."""
        if rank > 0 and self._lease is None:
            self._take(self._path(rank), LEASE + 30, refuse_live=False)

    def leave(self) -> None:
        """Write nothing from now on."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _path(self, rank: int | str) -> Path:
        return self._folder / f".rank-{rank}{_SUFFIX}"

    def _outlive(self, path: Path, patience: float) -> None:
        """Wait for a process of an earlier run."""
        self._take(path, patience, refuse_live=False)
        self.leave()

    def _take(self, path: Path, patience: float, *, refuse_live: bool) -> None:
        _remove_copy(path)
        lease = _lease(path, self._lost)
        live = _Watch(lease, path)
        try:
            lease.acquire(timeout=patience, cancel_check=lambda: live() and refuse_live)
        except Timeout as error:
            raise ValueError(
                f"'{self._folder}' is in use by {_holder(path)}. Wait for its end, or give this run a folder of its"
                f" own. If you are sure that this process is gone, delete '{path}'."
            ) from error
        # filelock ignores lines that it does not know. A copy of the folder has another inode.
        with path.open("a") as file:
            file.write(f"since={time.strftime('%Y-%m-%d %H:%M:%S %z')}\ninode={path.stat().st_ino}\n")
        self._lease = lease

    def _lost(self, compromise: LeaseCompromise) -> None:
        """Stop before two runs write to the folder."""
        if compromise.reason == "refresh-failed":
            _log.warning(
                "Cannot touch the lock of %s (%s): others may take this run for dead.", self._folder, compromise.error
            )
            return
        os.write(
            2, f"longce: error: {self._folder} was taken over by {_holder(Path(compromise.lock_file))}.\n".encode()
        )
        os._exit(1)


class _Watch:
    """Whether the holder of a lock lives, asked after each attempt to get the lock."""

    def __init__(self, lease: SoftFileLease, path: Path) -> None:
        self._lease = lease
        self._path = path
        self._first: tuple[str | None, int] | None = None

    def __call__(self) -> bool:
        owner = self._lease.owner
        if owner is None:
            return False
        if owner.hostname == socket.gethostname():  # the attempt would have replaced a dead process of this machine
            return True
        with suppress(FileNotFoundError):
            beat = (owner.token, self._path.stat().st_mtime_ns)
            if self._first is None or self._first[0] != owner.token:
                self._first = beat
                _log.warning("%s holds %s: looking whether it lives.", _holder(self._path), self._path.parent)
            return beat != self._first
        return False


def _lease(path: Path, lost: Callable[[LeaseCompromise], None] | None = None) -> SoftFileLease:
    return SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, on_compromise=lost)


def _entries(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _holder(path: Path) -> str:
    found = _entries(path)
    since = f" since {found['since']}" if "since" in found else ""
    return f"process {found['pid']} on {found['host']}{since}" if {"pid", "host"} <= found.keys() else "another process"


def _remove_copy(path: Path) -> None:
    """Remove a lock that came with a copy of a folder: its holder works elsewhere."""
    with suppress(FileNotFoundError):
        if _entries(path).get("inode", str(inode := path.stat().st_ino)) != str(inode):
            path.unlink()
