"""Checkpoint files, protected against crashes, full disks and flipped bits.

The search for a checkpoint makes only cheap checks: it must be complete, and its content without tensors must load. Its
tensors are compared with their checksums when it is loaded. The newest checkpoint is the one with the largest step
recorded in it, not the latest file time.
"""

import contextlib
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_modules.training.checkpoints.sharded import (
    UNSHARDED_FILE,
    find_content_damage,
    find_folder_damage,
    write_error,
)
from lightning_modules.utilities.collectives import gathered, rank_and_size
from lightning_modules.utilities.errors import refused_pickle
from lightning_modules.utilities.files import atomic_file, remove_folder

RUN_ID = "run_id"
"""Key in a checkpoint for the id of the run that wrote it."""

SUFFIX = ".ckpt"

_log = logging.getLogger(__name__)


class CheckedCheckpointIO(TorchCheckpointIO):
    """Writes files of `torch.save` atomically, and verifies their checksums on load.

    These files are zip archives with a CRC-32 of every tensor, which `torch.load` itself does not compare.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a temporary file, flush it to disk and rename it; raise a `CheckpointError` if that fails."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        torch.serialization.set_crc32_options(True)  # the default; files without it could not be verified
        try:
            with atomic_file(Path(path)) as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch hides the error of the file
            if not isinstance(reason, OSError):
                raise
            raise write_error(Path(path), reason.strerror) from error

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify the file and load it, without running code in it unless ``weights_only`` is False."""
        check_integrity(path)
        if Path(path).is_dir():
            raise ValueError(
                f"`ckpt_path` '{path}' is a sharded checkpoint: set `trainer.strategy` to"
                " `lightning_modules.training.fsdp.FullyShardedStrategy`, with any number of processes. With"
                " `save_distributed_checkpoint: false` its checkpoints are files, which every strategy can load."
            )
        try:
            # With `weights_only=None`, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD would decide. The file is memory-mapped, so
            # that the processes of a machine share it.
            return torch.load(path, map_location=map_location, weights_only=weights_only is not False, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:  # torch checks bits that zipfile ignores
            raise _load_error(path, refused_pickle(error)) from error

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or a folder atomically, so that a killed process does not leave half of a folder."""
        if "://" not in str(path) and Path(path).is_dir() and not Path(path).is_symlink():
            remove_folder(Path(path))
        else:
            super().remove_checkpoint(path)


def check_checkpoint(path: str | Path, option: str = "ckpt_path", *, resume: bool = False) -> None:
    """Raise a ``ValueError`` unless a checkpoint is complete and from ``longce fit``, without reading its tensors.

    The error names the newest intact one in the same folder. To ``resume``, weights alone are not sufficient.
    """
    _refuse(path, _find_fault(path, resume), option)


def check_integrity(path: str | Path, option: str = "ckpt_path") -> None:
    """Compare a checkpoint with its checksums. All processes must call it: they share the work and the outcome."""
    own = find_damage(path) or find_content_damage(Path(path), *rank_and_size())
    _refuse(path, next((problem for problem in gathered(own) if problem is not None), None), option)


def _refuse(path: str | Path, problem: str | None, option: str) -> None:
    if problem is not None:
        raise _load_error(path, problem, option)


def newest_checkpoint(folder: Path, *, resume: bool = True) -> Path | None:
    """Return the complete checkpoint with the largest step in the folder of a run, or None without checkpoints.

    Damaged ones are skipped with a warning. To ``resume``, files with weights alone do not count.
    """
    candidates = find_checkpoints(folder)
    check_one_run(folder, candidates)
    faults: dict[Path, str] = {}
    for candidate in candidates:
        fault = _find_fault(candidate.path, resume)
        if fault is None:
            for damaged, reason in faults.items():
                _log.warning("Skipping %s: it %s.", damaged, reason)
            return candidate.path
        faults[candidate.path] = fault
    if not faults:
        return None
    listed = ", ".join(f"{path.name} {fault}" for path, fault in faults.items())
    raise ValueError(f"No checkpoint in '{folder}' can be used: {listed}. Use another folder, or start a new run.")


def find_damage(path: str | Path) -> str | None:
    """Return why a checkpoint is incomplete, as the end of a sentence, or None if it is complete."""
    if "://" in str(path):
        return "is not loaded from the web: download it first"
    path = Path(path)
    if path.is_dir():
        return find_folder_damage(path)
    try:
        if not path.is_file():
            return "is not a file" if path.exists() else "does not exist"
        with zipfile.ZipFile(path):  # the list of its contents is at the end of the file
            return None
    except Exception as error:  # any kind for a damaged archive
        return f"is truncated or not a checkpoint ({str(error) or type(error).__name__})"


def _load_error(path: str | Path, problem: str, option: str = "ckpt_path") -> ValueError:
    """Return an error for a bad checkpoint that names the newest intact one in its folder."""
    others = [one.path for one in find_checkpoints(Path(path).parent) if one.path.absolute() != Path(path).absolute()]
    complete = (other for other in others if _find_fault(other, resume=True) is None)
    intact = next((other for other in complete if find_content_damage(other, 0, 1) is None), None)
    remedy = f"The newest intact one in its folder is {intact}." if intact else "Use another one."
    return ValueError(f"`{option}` '{path}' {problem}. {remedy}")


def _find_fault(path: str | Path, resume: bool) -> str | None:
    """Return why a checkpoint cannot be used, as the end of a sentence, or None if it can."""
    problem = find_damage(path)
    if problem is not None or Path(path).is_dir():
        return problem
    try:
        loaded = load_without_tensors(Path(path))
    except Exception as error:  # any kind for an archive that torch did not write
        return refused_pickle(error)
    if not isinstance(loaded.get("state_dict"), dict):
        return "was not written by `longce fit`"
    if resume and "optimizer_states" not in loaded:
        return "contains weights only, from which training cannot resume"
    return None


class Candidate(NamedTuple):
    """A checkpoint in the folder of a run, which may be damaged."""

    path: Path
    step: float  # optimizer step recorded in it, or else in its name, or else infinity
    run: str | None  # id of the run that wrote it, if recorded


def find_checkpoints(folder: Path) -> list[Candidate]:
    """List the checkpoints in a folder and in its ``checkpoints``, largest step first, without links."""
    candidates = []
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"checkpoints/*{SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # a running training removes older ones
            if not path.is_symlink():
                candidates.append(describe_checkpoint(path))
    # Lightning appends a version to the name of a second file for the same step.
    versions = {one.path: int((re.findall(r"-v(\d+)$", one.path.stem) or [0])[0]) for one in candidates}
    return sorted(candidates, key=lambda one: (one.step, versions[one.path]), reverse=True)


def describe_checkpoint(path: Path) -> Candidate:
    """Read the step and the run of a checkpoint, without loading tensors or running code in it."""
    path.stat()
    try:
        content = load_without_tensors(path)
    except Exception:  # damaged; `find_damage` reports how
        content = {}
    step = content.get("global_step")
    if not isinstance(step, int):
        named = re.findall(r"step\D?(\d+)", path.stem) or re.findall(r"\d+", re.sub(r"-v\d+$", "", path.stem))
        return Candidate(path, float(named[-1]) if named else math.inf, None)
    return Candidate(path, step, content.get(RUN_ID))


def load_without_tensors(path: Path) -> dict[str, Any]:
    """Load a checkpoint without its tensors or running code in it; torch raises any kind of error for other files."""
    file = path / UNSHARDED_FILE if path.is_dir() else path
    loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return loaded if isinstance(loaded, dict) else {}


def check_one_run(folder: Path, candidates: list[Candidate]) -> None:
    """Raise a ``ValueError`` if checkpoints are of different runs, because their steps cannot be compared."""
    first_of = {one.run: one.path.name for one in reversed(candidates) if one.run is not None}
    if len(first_of) > 1:
        named = ", ".join(f"{name} of run {run}" for run, name in sorted(first_of.items()))
        raise ValueError(f"'{folder}' contains checkpoints of {len(first_of)} runs ({named}): pass one of the files.")
