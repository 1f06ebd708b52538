"""Order of the checkpoints of a run: by the step that each records, never by file times."""

import contextlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_modules.training.checkpoints.sharded import REST

RUN_ID = "run_id"
"""Key in a checkpoint of the run that wrote it."""

SUFFIX = ".ckpt"


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
    """Load a checkpoint without its tensors, which stay on disk, and without running any code in it.

    Of a file that is not a checkpoint, torch raises anything.
    """
    file = path / REST if path.is_dir() else path
    loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return loaded if isinstance(loaded, dict) else {}


def check_one_run(folder: Path, candidates: list[Candidate]) -> None:
    """Raise a ``ValueError`` if a folder holds checkpoints of different runs, whose steps cannot be compared."""
    first_of = {one.run: one.path.name for one in reversed(candidates) if one.run is not None}
    if len(first_of) > 1:
        named = ", ".join(f"{name} of run {run}" for run, name in sorted(first_of.items()))
        raise ValueError(f"'{folder}' holds checkpoints of {len(first_of)} runs ({named}): name one of the files.")
