"""Checkpoints that a kill, a full disk or a flipped bit cannot turn into wrong weights."""

import functools
import logging
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_modules.training.checkpoints.order import (
    SUFFIX,
    check_one_run,
    contents,
    find_checkpoints,
    warn_of_times,
)
from lightning_modules.training.checkpoints.sharded import CheckpointError, damage_found_together, damage_of_folder
from lightning_modules.utilities.files import BUILDING, atomic_file, remove_folder
from lightning_modules.utilities.identity import file_state
from lightning_modules.utilities.pickles import refused_pickle

_VERSION = "pytorch-lightning_version"

_log = logging.getLogger(__name__)


class CheckedCheckpointIO(TorchCheckpointIO):
    """Files as `torch.save` writes them, put in place in one step, and checked whenever they are loaded.

    Torch's files are zip archives with a CRC-32 of every tensor and of what names them. `torch.load` looks at none of
    these; here all are compared, which reads the file once more, by several processes a part by each. Addresses on the
    web are written to by Lightning and never loaded. What sharded strategies write (folders) does not pass through
    here, but it is removed here.
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
                " some room, or set the `dirpath` of the checkpoint callback to another disk, and go on with"
                f" `--ckpt_path {Path(path).parent}`",
            ) from error

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Check the file and load it, without running any code that it may hold unless that is asked for explicitly.

        Raises:
            ValueError: If there is none, or it is torn or damaged.
        """
        if Path(path).is_dir():
            if (problem := damage(Path(path))) is not None:
                raise refusal(path, problem)
            raise ValueError(
                f"`ckpt_path` '{path}' is divided among processes: set `trainer.strategy` to"
                " `lightning_modules.training.fsdp.FullyShardedStrategy`, for any number of processes. With"
                " `save_distributed_checkpoint: false` its checkpoints are files, from which all others can go on."
            )
        check_together(path)
        try:
            # `weights_only=None` would leave it to TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD. Mapped, for else each process of a
            # machine would hold all of the file in main memory.
            return torch.load(path, map_location=map_location, weights_only=weights_only is not False, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:  # torch minds bits that zipfile passes over
            raise refusal(path, refused_pickle(error)) from error

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or a folder in one step: a process that is killed meanwhile leaves no part of a folder."""
        if "://" not in str(path) and Path(path).is_dir() and not Path(path).is_symlink():
            remove_folder(Path(path))
        else:
            super().remove_checkpoint(path)


def check_checkpoint(
    path: str | Path, option: str = "ckpt_path", *, resume: bool = False, content: bool = True
) -> None:
    """Read a checkpoint file and compare it with its checksums; of a sharded checkpoint see that it is complete.

    Args:
        path: The checkpoint.
        option: How messages cite it.
        resume: Refuse one of weights alone, too.
        content: Whether to read the file. If not, it only has to be complete: see `check_together`.

    Raises:
        ValueError: If it is missing, torn, damaged or on the web; the message names the newest good one beside it.
    """
    if "://" in str(path):
        raise ValueError(f"`{option}` '{path}': checkpoints are not loaded from the web. Download it first.")
    if (problem := _fault(Path(path), resume, content)) is not None:
        raise refusal(path, problem, option, content=content)


def check_together(path: str | Path) -> None:
    """Compare a checkpoint with its checksums: each process of a group takes a part of it, and all must ask.

    Raises:
        ValueError: In all of them, if it is missing, torn, damaged or on the web.
    """
    check_checkpoint(path, content=not _several())
    shared = dist.is_initialized() if Path(path).is_dir() else _several()
    if shared and (problem := damage_found_together(Path(path))) is not None:
        raise refusal(path, problem)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_content(path: str | Path, option: str = "ckpt_path") -> None:
    """See that a whole checkpoint file is one of Lightning's; tensors stay on disk, and no code in it is run.

    Raises:
        ValueError: If it holds something else.
    """
    if Path(path).is_dir():
        return
    try:
        content = contents(Path(path))
    except Exception as error:  # of an archive that torch did not write
        raise refusal(path, refused_pickle(error), option) from error
    if not isinstance(content.get("state_dict"), dict) or _VERSION not in content:
        raise refusal(path, "was not written by `longce fit`: it has no weights with a version", option)


def newest_checkpoint(folder: Path, *, resume: bool = True, content: bool = True) -> Path | None:
    """Find the checkpoint of the largest step in a folder, or in its ``checkpoints``, that is whole.

    Steps decide, not times of change. The log names damaged ones that are passed over.

    Args:
        folder: Of a run, or of its checkpoints.
        resume: Whether training resumes from it: files with weights alone do not count then.
        content: As in `check_checkpoint`.

    Returns:
        The checkpoint; None if the folder has none.

    Raises:
        ValueError: If none can be used, or they come from different runs.
    """
    candidates = find_checkpoints(folder)
    check_one_run(folder, candidates)
    faults: dict[Path, str] = {}
    for candidate in candidates:
        if (fault := _fault(candidate.path, resume, content)) is None:
            for damaged, reason in faults.items():
                _log.warning("Passing over %s: it %s.", damaged, reason)
            warn_of_times(candidate, candidates)
            return candidate.path
        faults[candidate.path] = fault
    if not faults:
        return None
    listed = ", ".join(f"{path.name} {fault}" for path, fault in faults.items())
    raise ValueError(f"No checkpoint in '{folder}' can be used: {listed}. Name another folder or start afresh.")


def damage(path: Path, *, content: bool = True) -> str | None:
    """What is wrong with a checkpoint, as the end of a sentence; None if it is whole.

    A file that was found whole is not read again in this process unless it has changed. Without ``content`` it is not
    read at all: it is whole if its list of contents is there, which is at its end.
    """
    if path.is_dir():
        return damage_of_folder(path)
    try:
        state = tuple(file_state(path))
    except ValueError:
        return "is no file" if path.exists() else "does not exist"
    return _damage(path, state, content)


@functools.cache
def _damage(path: Path, _state: tuple[int, ...], content: bool) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip() if content else None
    except Exception as error:  # of a damaged archive zipfile raises whatever it stumbles over
        return f"is torn or no checkpoint ({str(error) or type(error).__name__})"
    return record and f"is damaged: '{record}' in it is not what was written"


def refusal(path: str | Path, problem: str, option: str = "ckpt_path", *, content: bool = True) -> ValueError:
    """An error that says what is wrong with a checkpoint, and names the newest good one beside it."""
    others = [one.path for one in find_checkpoints(Path(path).parent) if one.path.absolute() != Path(path).absolute()]
    content = content and not _several()
    good = next((other for other in others if _fault(other, resume=True, content=content) is None), None)
    remedy = f"The newest good one beside it is {good}." if good else "Name another one."
    return ValueError(f"`{option}` '{path}' {problem}. {remedy}")


def _fault(path: Path, resume: bool, content: bool) -> str | None:
    """Why training cannot go on from a checkpoint, or it cannot be loaded at all; None if it can."""
    if (problem := damage(path, content=content)) is not None or path.is_dir() or not resume:
        return problem
    try:
        loaded = contents(path)
    except (pickle.UnpicklingError, RuntimeError, OSError) as error:
        return refused_pickle(error)
    if not isinstance(loaded.get("state_dict"), dict):
        return "was not written by `longce fit`"
    return None if "optimizer_states" in loaded else "holds weights alone, from which training cannot go on"


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left, each as large as a checkpoint; nobody else may be writing there."""
    for path in folder.glob(f"{BUILDING}*{SUFFIX}@*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
