"""Checkpoints that a kill, a full disk or a flipped bit cannot turn into wrong weights.

A checkpoint is looked for by what costs nothing: it must be complete, and its state without tensors must load. Its
content is compared with its checksums when it is loaded. Of several the newest is that of the largest step which it
records, never that of the latest file time.
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

from lightning_modules.training.checkpoints.sharded import REST, damage_of_content, damage_of_folder, not_written
from lightning_modules.utilities.collectives import gathered, rank_and_size
from lightning_modules.utilities.files import atomic_file, remove_folder
from lightning_modules.utilities.pickles import refused_pickle

RUN_ID = "run_id"
"""Key in a checkpoint of the run that wrote it."""

SUFFIX = ".ckpt"

_log = logging.getLogger(__name__)


class CheckedCheckpointIO(TorchCheckpointIO):
    """Files as `torch.save` writes them, put in place in one step, and checked whenever they are loaded.

    Torch's files are zip archives with a CRC-32 of every tensor, which `torch.load` ignores; here all are compared.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file beside its target, flush it to disk and rename it; a full disk is a `CheckpointError`."""
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
            raise not_written(Path(path), reason.strerror) from error

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Check the file and load it, without running any code in it unless that is asked for explicitly."""
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
    """Check that a checkpoint is complete and written by ``longce fit``, without reading its tensors.

    The ``ValueError`` names the newest good one beside it. To ``resume``, weights alone are not enough.
    """
    if (problem := _fault(path, resume)) is not None:
        raise _refusal(path, problem, option)


def check_integrity(path: str | Path, option: str = "ckpt_path") -> None:
    """Compare a checkpoint with its checksums. All processes must ask: they share a folder's files and the outcome."""
    own = damage(path) or damage_of_content(Path(path), *rank_and_size())
    problem = next((problem for problem in gathered(own) if problem is not None), None)
    if problem is not None:
        raise _refusal(path, problem, option)


def newest_checkpoint(folder: Path, *, resume: bool = True) -> Path | None:
    """Return the complete checkpoint of the largest step in the folder of a run, or None if it has no checkpoints.

    The log names damaged ones that are passed over. Files with weights alone do not count if training resumes.
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


class Candidate(NamedTuple):
    """A checkpoint in the folder of a run, which may be damaged."""

    path: Path
    step: float  # optimizer steps that it records; by its name if it cannot be read, else infinite
    run: str | None  # id of the run that wrote it, if it records one


def find_checkpoints(folder: Path) -> list[Candidate]:
    """List the checkpoints in a folder and in its ``checkpoints``, largest step first; links are left out."""
    found = []
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"checkpoints/*{SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # a run that still trains removes its older ones
            if not path.is_symlink():
                found.append(describe(path))
    # Lightning appends a version to the name of a second file of the same step.
    versions = {one.path: int((re.findall(r"-v(\d+)$", one.path.stem) or [0])[0]) for one in found}
    return sorted(found, key=lambda one: (one.step, versions[one.path]), reverse=True)


def describe(path: Path) -> Candidate:
    """Read the step and the run of a checkpoint; tensors stay on disk, and no code in it is run."""
    path.stat()
    try:
        content = contents(path)
    except Exception:  # damaged; `damage` reports how
        content = {}
    step = content.get("global_step")
    if not isinstance(step, int):
        named = re.findall(r"step\D?(\d+)", path.stem) or re.findall(r"\d+", re.sub(r"-v\d+$", "", path.stem))
        return Candidate(path, float(named[-1]) if named else math.inf, None)
    return Candidate(path, step, content.get(RUN_ID))


def contents(path: Path) -> dict[str, Any]:
    """Load a checkpoint without its tensors and without running code in it; torch raises anything for other files."""
    file = path / REST if path.is_dir() else path
    loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return loaded if isinstance(loaded, dict) else {}


def check_one_run(folder: Path, candidates: list[Candidate]) -> None:
    """Raise a ``ValueError`` if a folder holds checkpoints of different runs, whose steps cannot be compared."""
    first_of = {one.run: one.path.name for one in reversed(candidates) if one.run is not None}
    if len(first_of) > 1:
        named = ", ".join(f"{name} of run {run}" for run, name in sorted(first_of.items()))
        raise ValueError(f"'{folder}' holds checkpoints of {len(first_of)} runs ({named}): name one of the files.")
