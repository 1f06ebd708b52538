"""Checkpoints that a kill, a full disk or a flipped bit cannot turn into wrong weights.

A checkpoint is looked for by what costs nothing: it must be complete, and its state without tensors must load. Its
content is compared with its checksums when it is loaded.
"""

import logging
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_modules.training.checkpoints.order import SUFFIX, check_one_run, contents, find_checkpoints
from lightning_modules.training.checkpoints.sharded import (
    CheckpointError,
    damage_of_content,
    damage_of_folder,
)
from lightning_modules.utilities.collectives import gathered, rank_and_size
from lightning_modules.utilities.files import BUILDING, atomic_file, remove_folder
from lightning_modules.utilities.pickles import refused_pickle

_log = logging.getLogger(__name__)


class CheckedCheckpointIO(TorchCheckpointIO):
    """Files as `torch.save` writes them, put in place in one step, and checked whenever they are loaded.

    Torch's files are zip archives with a CRC-32 of every tensor, which `torch.load` ignores; here all are compared.
    Addresses on the web are written to by Lightning and never loaded. Folders of sharded strategies are only removed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file beside its target, flush it to disk and give it its name.

        Raises:
            CheckpointError: If it cannot be written, as on a full disk. What was there is as it was.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        torch.serialization.set_crc32_options(True)  # the default, without which no file could be checked
        try:
            with atomic_file(Path(path)) as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__  # torch hides that of the file
            if not isinstance(reason, OSError):
                raise
            raise CheckpointError(
                reason.errno,
                f"The checkpoint {path} could not be written ({reason.strerror}). Earlier ones are untouched: free"
                " some room, or set the `dirpath` of the checkpoint callback to another disk, and resume with"
                f" `--ckpt_path {Path(path).parent}`",
            ) from error

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Check the file and load it, without running any code in it unless that is asked for explicitly.

        Raises:
            ValueError: If it is missing, torn or damaged.
        """
        check_integrity(path)
        if Path(path).is_dir():
            raise ValueError(
                f"`ckpt_path` '{path}' is divided among processes: set `trainer.strategy` to"
                " `lightning_modules.training.fsdp.FullyShardedStrategy`, for any number of processes. With"
                " `save_distributed_checkpoint: false` its checkpoints are files, which all others can resume from."
            )
        try:
            # `weights_only=None` would leave it to TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD. Mapped, as otherwise each process
            # of a machine would hold all of the file in main memory.
            return torch.load(path, map_location=map_location, weights_only=weights_only is not False, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:  # torch sees bits that zipfile ignores
            raise _refusal(path, refused_pickle(error)) from error

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or a folder in one step: a process that is killed meanwhile leaves no part of a folder."""
        if "://" not in str(path) and Path(path).is_dir() and not Path(path).is_symlink():
            remove_folder(Path(path))
        else:
            super().remove_checkpoint(path)


def check_checkpoint(path: str | Path, option: str = "ckpt_path", *, resume: bool = False) -> None:
    """Check that a checkpoint is complete and written by ``longce fit``; its tensors are not read.

    Raises:
        ValueError: If it is missing, torn, on the web, or to be resumed from and holds weights alone; the message names
            the newest good one beside it.
    """
    if (problem := _fault(path, resume)) is not None:
        raise _refusal(path, problem, option)


def check_integrity(path: str | Path, option: str = "ckpt_path") -> None:
    """Compare a checkpoint with its checksums; the processes of a group share the files of a folder, and all must ask.

    Raises:
        ValueError: In all of them, if it is missing, torn, damaged or on the web.
    """
    own = damage(path) or damage_of_content(Path(path), *rank_and_size())
    problem = next((problem for problem in gathered(own) if problem is not None), None)
    if problem is not None:
        raise _refusal(path, problem, option)


def newest_checkpoint(folder: Path, *, resume: bool = True) -> Path | None:
    """Return the complete checkpoint of the largest step in the folder of a run, or None if it has no checkpoints.

    The log names damaged ones that are passed over. Files with weights alone do not count if training resumes.

    Raises:
        ValueError: If none can be used, or they come from different runs.
    """
    candidates = find_checkpoints(folder)
    check_one_run(folder, candidates)
    faults: dict[Path, str] = {}
    for candidate in candidates:
        if (fault := _fault(candidate.path, resume)) is None:
            for damaged, reason in faults.items():
                _log.warning("Passing over %s: it %s.", damaged, reason)
            return candidate.path
        faults[candidate.path] = fault
    if not faults:
        return None
    listed = ", ".join(f"{path.name} {fault}" for path, fault in faults.items())
    raise ValueError(f"No checkpoint in '{folder}' can be used: {listed}. Name another folder, or start a new run.")


def damage(path: str | Path) -> str | None:
    """Return why a checkpoint is incomplete, as the end of a sentence; None if it is complete."""
    if "://" in str(path):
        return "is not loaded from the web: download it first"
    if (path := Path(path)).is_dir():
        return damage_of_folder(path)
    try:
        if not path.is_file():
            return "is not a file" if path.exists() else "does not exist"
        with zipfile.ZipFile(path):  # its list of contents is at its end
            return None
    except Exception as error:  # a damaged archive raises anything
        return f"is torn, or not a checkpoint ({str(error) or type(error).__name__})"


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left; no other process may be writing there."""
    for path in folder.glob(f"{BUILDING}*{SUFFIX}@*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _refusal(path: str | Path, problem: str, option: str = "ckpt_path") -> ValueError:
    """Return an error that names the newest good checkpoint beside a bad one."""
    others = [one.path for one in find_checkpoints(Path(path).parent) if one.path.absolute() != Path(path).absolute()]
    whole = (other for other in others if _fault(other, resume=True) is None)
    good = next((other for other in whole if damage_of_content(other, 0, 1) is None), None)
    remedy = f"The newest good one beside it is {good}." if good else "Name another one."
    return ValueError(f"`{option}` '{path}' {problem}. {remedy}")


def _fault(path: str | Path, resume: bool) -> str | None:
    """Return why a checkpoint cannot be used, as the end of a sentence; None if it can."""
    if (problem := damage(path)) is not None or Path(path).is_dir():
        return problem
    try:
        loaded = contents(Path(path))
    except Exception as error:  # an archive that torch did not write raises anything
        return refused_pickle(error)
    if not isinstance(loaded.get("state_dict"), dict):
        return "was not written by `longce fit`"
    if resume and "optimizer_states" not in loaded:
        return "holds weights alone, from which training cannot resume"
    return None
