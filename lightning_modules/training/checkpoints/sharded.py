"""Sharded checkpoints: folders that several processes write and verify together, atomically."""

import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorStorageMetadata
from typing_extensions import override

from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.errors import first_cause
from lightning_modules.utilities.files import create_folder, publish_folder, to_disk, write_atomically
from lightning_modules.utilities.identity import file_crc32

Result = TypeVar("Result")

MANIFEST = "checksums.json"
"""File with size and CRC-32 of all others in the folder, written last."""

UNSHARDED_FILE = "meta.pt"
"""Lightning's file with everything that is not sharded."""

_INDEX = ".metadata"  # torch's index of the shards

_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
}
"""Classes that an index may contain, by module."""

_ENUM_MEMBERS = frozenset(_MEM_FORMAT_ENCODING.__members__)
"""Read before any index, because unpickling an index can modify the class."""


class CheckpointError(OSError):
    """A checkpoint could not be written; older ones are unchanged."""


def write_error(target: Path, reason: object) -> CheckpointError:
    """Return an error for a checkpoint that could not be written, with the remedy."""
    return CheckpointError(
        f"The checkpoint {target} could not be written ({reason}). Earlier ones are unchanged: free some space, or"
        " set the `dirpath` of the checkpoint callback to another disk that all processes can access, and resume with"
        f" `--ckpt_path {target.parent}`"
    )


class _ProcessError(Exception):
    """Raised in all processes when one of them has failed."""


def is_sharded(path: Path) -> bool:
    """Return whether a folder is a sharded checkpoint that was written to the end."""
    return all((path / name).is_file() for name in (_INDEX, UNSHARDED_FILE))


def write_sharded(target: Path, write: Callable[[Path], None]) -> None:
    """Write a sharded checkpoint atomically: all processes write to a temporary folder, which then replaces ``target``.

    ``write`` writes the files of this process: those named ``__RANK_..``, and in the first process all others. If one
    process fails, all raise a `CheckpointError`, and ``target`` is unchanged.
    """
    rank, folder = dist.get_rank(), None
    try:
        # 1. Create the temporary folder.
        folder = _run_in_all(lambda: create_folder(target) if rank == 0 else None)[0]
        assert folder is not None
        # 2. Write the shards, and collect size and checksum of each file.
        of_processes = _run_in_all(lambda: _write_shard(folder, write, rank))
        entries = {name: entry for of_process in of_processes for name, entry in of_process.items()}
        # 3. Write the manifest, now that all shards are on disk, and rename the folder.
        _run_in_all(lambda: _publish_shards(folder, target, entries) if rank == 0 else None)
    except _ProcessError as error:
        raise write_error(target, error) from error
    finally:
        if folder is not None and rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def find_folder_damage(path: Path) -> str | None:
    """Return why a sharded checkpoint is incomplete or unsafe, as the end of a sentence, or None.

    Folders of Lightning's own strategies have no checksums and only need to be complete.
    """
    if not is_sharded(path):
        return "is not a complete sharded checkpoint"
    try:
        for name, (size, _) in _read_manifest(path).items():
            if (path / name).stat().st_size != size:
                return f"is truncated: the size of {name} has changed"
        # `torch.distributed.checkpoint` unpickles the index without restrictions, so it is checked here first.
        with (path / _INDEX).open("rb") as stream:
            _IndexUnpickler(stream).load()
        torch.load(path / UNSHARDED_FILE, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        return f"is incomplete: {Path(error.filename).name} is missing"
    except Exception as error:  # any kind for a damaged pickle
        return f"is damaged, or contains more than weights ({first_cause(error)})"
    return None


def find_content_damage(path: Path, rank: int, processes: int) -> str | None:
    """Compare this process's fraction of a complete checkpoint with the checksums; return the damage, or None."""
    damaged = None
    try:
        if path.is_dir():
            entries = _read_manifest(path)
            names = sorted(entries, key=lambda name: entries[name])[rank::processes]  # of similar size in total
            damaged = next((name for name in names if file_crc32(path / name) != entries[name][1]), None)
        elif rank == 0:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
    except Exception as error:  # any kind for a damaged archive
        return f"is damaged ({str(error) or type(error).__name__})"
    return None if damaged is None else f"is damaged: the checksum of '{damaged}' in it is wrong"


def load_unsharded(path: Path) -> dict[str, Any]:
    """Load a verified sharded checkpoint into main memory, without the optimizer's state."""
    content: dict[str, Any] = torch.load(path / UNSHARDED_FILE, map_location="cpu", weights_only=True)
    reader = dcp.FileSystemReader(path)
    prefix = "state_dict."
    weights: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with no_code(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(weights, storage_reader=reader, no_dist=True)
    return {**content, "state_dict": {name.removeprefix(prefix): weight for name, weight in weights.items()}}


@contextmanager
def no_code() -> Iterator[None]:
    """Restrict torch to ``weights_only`` unpickling: for sharded optimizers it would load any object."""
    with mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        yield


def _run_in_all(function: Callable[[], Result]) -> list[Result]:
    """Return the results of all processes; if one fails, raise an error in all, so that none waits for it."""
    result, failure = None, None
    try:
        result = function()
    except CheckpointException as error:  # torch has collected the failures of all processes
        failure = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    except Exception as error:  # raised again below, in every process
        failure = getattr(error, "strerror", None) or str(error) or type(error).__name__
    outcomes = gathered((result, failure))
    failures = [f"process {rank}: {failed}" for rank, (_, failed) in enumerate(outcomes) if failed is not None]
    if failures:
        raise _ProcessError("; ".join(failures))
    return [result for result, _ in outcomes]


def _write_shard(folder: Path, write: Callable[[Path], None], rank: int) -> dict[str, tuple[int, int]]:
    """Write the files of this process, flush them to disk, and return their sizes and checksums."""
    write(folder)
    own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own += [path for path in folder.iterdir() if not path.name.startswith("__")]
    for path in own:
        to_disk(path)
    return {path.name: (path.stat().st_size, file_crc32(path)) for path in own}


def _publish_shards(folder: Path, target: Path, entries: dict[str, tuple[int, int]]) -> None:
    missing = [name for name in entries if not (folder / name).exists()]
    if missing:
        raise _ProcessError(f"{missing[0]} of another process is not on the disk of the first process")
    write_atomically(folder / MANIFEST, json.dumps(entries).encode())
    if target.is_file():
        target.unlink()
    to_disk(folder)
    publish_folder(folder, target, replace=True)


def _read_manifest(path: Path) -> dict[str, tuple[int, int]]:
    """Return size and checksum of each file; empty for a folder of Lightning's own strategies."""
    if not (path / MANIFEST).exists():
        return {}
    content = json.loads((path / MANIFEST).read_bytes())
    return {Path(name).name: (int(size), int(crc)) for name, (size, crc) in content.items()}


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles objects of the classes that an index may contain, and no others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_NAMES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _enum_member(kind: Any, name: str) -> Any:
    """Return what ``getattr`` returns, for the enum of an index only: Python 3.11.2 pickles its members like this."""
    if kind is _MEM_FORMAT_ENCODING and type(name) is str and name in _ENUM_MEMBERS:
        return getattr(kind, name)
    raise pickle.UnpicklingError(f"it refers to {name} of {kind}")
