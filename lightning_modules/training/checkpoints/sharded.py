"""Checkpoints that several processes write or check together: folders of their parts, whole or not there."""

import json
import os
import pickle
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typing_extensions import override

from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.files import create_folder, publish_folder, to_disk, write_atomically
from lightning_modules.utilities.pickles import first_cause

Result = TypeVar("Result")

MANIFEST = "checksums.json"
"""File of sizes and CRC-32 of all others in the folder; the last one to be written."""

REST = "meta.pt"
"""Lightning's file of all that is not divided."""

_INDEX = ".metadata"  # torch's: what is in which part

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
"""Classes in an index, by module."""


class CheckpointError(OSError):
    """A checkpoint that could not be written; the older ones are as they were."""


def not_written(target: Path, reason: object) -> CheckpointError:
    """Return an error that reports why a checkpoint could not be written, and what to do."""
    return CheckpointError(
        f"The checkpoint {target} could not be written ({reason}). Earlier ones are untouched: free some room, or set"
        " the `dirpath` of the checkpoint callback to another disk that all processes see, and resume with"
        f" `--ckpt_path {target.parent}`"
    )


class _PartError(Exception):
    """Something failed in one of the processes; raised in all of them."""


def is_sharded(path: Path) -> bool:
    """Whether a sharded strategy finished writing this folder."""
    return all((path / name).is_file() for name in (_INDEX, REST))


def write_together(target: Path, write: Callable[[Path], None]) -> None:
    """Let every process write its part into a folder beside ``target``, which it then replaces in one step.

    ``write`` writes the files of this process: those named ``__RANK_..``, and in the first process all others. If one
    cannot write, all raise a `CheckpointError`, and what was there is as it was.
    """
    rank, folder = dist.get_rank(), None
    try:
        folder = _in_all(lambda: create_folder(target) if rank == 0 else None)[0]
        assert folder is not None
        parts = _in_all(lambda: _write_part(folder, write, rank))
        entries = {name: entry for part in parts for name, entry in part.items()}
        _in_all(lambda: _publish(folder, target, entries) if rank == 0 else None)
    except _PartError as error:
        raise not_written(target, error) from error
    finally:
        if folder is not None and rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def damage_of_folder(path: Path) -> str | None:
    """Return why a folder is incomplete or hostile, as the end of a sentence; None if it is not.

    Folders without checksums, of Lightning's own strategies, only have to be complete.
    """
    if not is_sharded(path):
        return "is not a complete sharded checkpoint"
    try:
        for name, (size, _) in _read_manifest(path).items():
            if (path / name).stat().st_size != size:
                return f"is torn: {name} does not have the size that was written"
        # `torch.distributed.checkpoint` unpickles the index without restrictions, and other values under `no_code`.
        with (path / _INDEX).open("rb") as stream:
            _IndexUnpickler(stream).load()
        torch.load(path / REST, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        return f"is incomplete: {Path(error.filename).name} is missing"
    except Exception as error:  # of a damaged pickle anything
        return f"is damaged, or holds more than weights ({first_cause(error)})"
    return None


def damage_of_content(path: Path, rank: int, processes: int) -> str | None:
    """Return what in a complete checkpoint, of which each process reads a share, differs from its checksums."""
    damaged = None
    try:
        if path.is_dir():
            entries = _read_manifest(path)
            names = sorted(entries, key=lambda name: entries[name])[rank::processes]  # by size: an even share for each
            damaged = next((name for name in names if _checksum(path / name) != entries[name][1]), None)
        elif rank == 0:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
    except Exception as error:  # a damaged archive raises anything
        return f"is damaged ({str(error) or type(error).__name__})"
    return None if damaged is None else f"is damaged: '{damaged}' in it is not what was written"


def load_whole(path: Path) -> dict[str, Any]:
    """Load a sharded checkpoint, whose content was checked, into main memory, without the optimizer's state."""
    content: dict[str, Any] = torch.load(path / REST, map_location="cpu", weights_only=True)
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
    """Let torch unpickle only numbers: it asks for more when it reads the settings of divided optimizers."""
    with mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
        os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
        yield


def _in_all(function: Callable[[], Result]) -> list[Result]:
    """Return the result of each process; if it fails in one of them, it fails in all, so that none waits for it."""
    result, failure = None, None
    try:
        result = function()
    except CheckpointException as error:  # torch has collected what failed where
        failure = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    except Exception as error:  # passed on, in every process
        failure = getattr(error, "strerror", None) or str(error) or type(error).__name__
    found = gathered((result, failure))
    failures = [f"process {rank}: {failed}" for rank, (_, failed) in enumerate(found) if failed is not None]
    if failures:
        raise _PartError("; ".join(failures))
    return [result for result, _ in found]


def _write_part(folder: Path, write: Callable[[Path], None], rank: int) -> dict[str, tuple[int, int]]:
    """Return size and checksum of each file that this process wrote, all of them on disk."""
    write(folder)
    own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    if rank == 0:
        own += [path for path in folder.iterdir() if not path.name.startswith("__")]
    for path in own:
        to_disk(path)
    return {path.name: (path.stat().st_size, _checksum(path)) for path in own}


def _publish(folder: Path, target: Path, entries: dict[str, tuple[int, int]]) -> None:
    if missing := [name for name in entries if not (folder / name).exists()]:
        raise _PartError(f"{missing[0]} of another process is not on the disk of the first one")
    write_atomically(folder / MANIFEST, json.dumps(entries).encode())
    if target.is_file():
        target.unlink()
    to_disk(folder)
    publish_folder(folder, target, replace=True)


def _read_manifest(path: Path) -> dict[str, tuple[int, int]]:
    """Return size and checksum by the names of files; empty in a folder of Lightning's own strategies."""
    if not (path / MANIFEST).exists():
        return {}
    content = json.loads((path / MANIFEST).read_bytes())
    return {Path(name).name: (int(size), int(crc)) for name, (size, crc) in content.items()}


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


class _IndexUnpickler(pickle.Unpickler):
    """Makes objects of the classes of an index, and no others."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
