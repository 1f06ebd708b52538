"""Work that several processes need and one shall do: locks that die with their holder, and what the dead leave."""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_modules.files import BUILDING, HOST, building_prefix

ABANDONED = 24 * 3600
"""Seconds without a change after which another machine's unfinished folder counts as abandoned, its lock being free."""

_SUFFIX = ".lock"
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)

_log = logging.getLogger(__name__)


@contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Keep every other process out that asks for the same target; waits, and says for whom.

    The lock is a file beside the target, locked by ``flock``: the kernel frees it however its holder ends. On NFS
    (Linux 2.6.12 or later) the server keeps it, so that it holds between machines, and frees that of a machine that
    died when its lease runs out. Where the file system knows no locks, or only for each machine alone (Lustre without
    ``flock``), the work may be done twice; publishing in one step makes that harmless.

    What dead processes have left beside the target is removed on entering.

    Args:
        target: File or folder to be made; its folder exists and can be written to.
    """
    path = _lock_path(target)
    descriptor = _acquired(path)
    try:
        if descriptor is not None:
            _remove_leftovers(target)
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # while it is locked: who waits for it then sees that it is gone
            os.close(descriptor)


def _acquired(path: Path) -> int | None:
    """Descriptor of the locked file; None where there are no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # a cache may be shared: whoever may write to the folder may wait, whatever the umask
            os.fchmod(descriptor, 0o666)
        try:
            if not _locked(descriptor):
                _log.warning("Waiting for %s, which prepares %s.", _holder(descriptor), path.stem[1:])
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {HOST}".encode(), 0)
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                _log.warning("%s: no locks here (%s); the same work may be done twice.", path.parent, error.strerror)
                return None
            raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before us removed it: agree with everybody else on the new one


def _locked(descriptor: int) -> bool:
    """Whether the lock could be had without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one that others find at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"


def _lock_path(target: Path) -> Path:
    return target.parent / f".{target.name}{_SUFFIX}"


def _remove_leftovers(target: Path) -> None:
    """Remove unfinished folders of dead processes: of this target, whose lock is ours, and where a lock is free."""
    _remove_unfinished(target)
    for path in target.parent.glob(f".*{_SUFFIX}"):
        if path == _lock_path(target):
            continue
        with suppress(OSError):  # another user's, or gone meanwhile
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _locked(descriptor) and _is_at(descriptor, path):
                    _remove_unfinished(path.with_name(path.stem[1:]))
                    path.unlink()
            finally:
                os.close(descriptor)


def _remove_unfinished(target: Path) -> None:
    for folder in target.parent.glob(f"{BUILDING}{target.name}@*"):
        # Some file systems lock for each machine alone: a free lock then says nothing of what others are at.
        if folder.name.startswith(building_prefix(target)) or time.time() - _last_change(folder) > ABANDONED:
            _log.info("Removing %s, which a process that died has left.", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _last_change(folder: Path) -> float:
    """When something in the folder was last written to, in seconds since 1970; now, if it is just disappearing."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


class RunLock:
    """Held by all processes of a run that writes to a folder: the next run begins when the last of them is gone.

    After a kill of one process the others live on for some seconds, and may still write what a new run is to do again.

    Args:
        folder: A local folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f".run{_SUFFIX}"
        self._descriptor: int | None = None

    def begin(self, patience: float = 60.0) -> None:
        """For the first process of a run, before it looks at the folder; it waits for what is left of the run before.

        Args:
            patience: Seconds to wait.

        Raises:
            ValueError: If another run is still writing there.
        """
        deadline = time.monotonic() + patience
        descriptor = self._opened()
        try:
            while not _locked(descriptor):
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"Another run is writing to {self._path.parent}. Wait for its end, or name another folder."
                    )
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _log.warning("%s: no locks here (%s); let no two runs write there.", self._path.parent, error.strerror)
        except ValueError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def join(self) -> None:
        """For every process of the run, once the first one has begun."""
        if self._descriptor is None:
            self._descriptor = self._opened()
        with suppress(OSError):  # no locks here, as `begin` has said
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def leave(self) -> None:
        """This process writes nothing any more. Forked children share the lock and lose it, too."""
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):
            os.fchmod(descriptor, 0o666)
        return descriptor
