"""A training run: a folder with an identity and a config, which one job at a time writes to."""

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_modules.training.checkpoints.io import (
    SUFFIX,
    Candidate,
    check_one_run,
    damage,
    describe,
    find_checkpoints,
)
from lightning_modules.training.checkpoints.resume import check_same_checkpoint
from lightning_modules.utilities.files import remove_unfinished, write_atomically
from lightning_modules.utilities.locks import RunLock

RUN_FILE = "run.json"
"""File in the folder of a run: its id, seed and config, written once."""

CONFIG_FILE = "config.yaml"


class Run:
    """The local folders of one training, kept from before its first write until its last process ends.

    The first folder gets ``run.json`` and ``config.yaml``, both written once. A resumed run keeps them, and adds its
    config as ``config-resumed-at-step-N.yaml``. From `record` on the run has an ``id``, which its checkpoints carry.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.id: str | None = None
        self._lock = RunLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": RunLock()}  # the process that launches others keeps it

    def begin(self, folders: Sequence[Path]) -> None:
        """Keep other runs out, in the first process; raise a ``ValueError`` that names the process of another one."""
        self.folders = list(folders)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(*_to_lock(folders))
        self._lock.begin()
        for folder in folders:
            remove_unfinished(folder, f"*{SUFFIX}")

    def join(self, folders: Sequence[Path], rank: int) -> None:
        """Take part, in every other process."""
        self._lock = RunLock(*(folder for folder in _to_lock(folders) if folder.is_dir()))  # where all nodes see it
        self._lock.join(rank)

    def leave(self) -> None:
        """Write nothing from now on."""
        self._lock.leave()
        for folder in reversed(self.folders):
            with suppress(OSError):  # of a run that was refused: empty
                folder.rmdir()

    def record(self, checkpoint: Path | None, config: str, seed: int | None, *, named: bool = False) -> None:
        """Write id and config (YAML), in the first process, unless the folders hold checkpoints of another training.

        Training resumes from the checkpoint: the newest one, unless the user ``named`` it.
        """
        start = None if checkpoint is None else describe(checkpoint.resolve())
        continued = self._check_continues(start, named)
        if not self.folders:
            return
        folder, known = self.folders[0], read_run(self.folders[0])
        name = _config_name(folder, start)
        write_atomically(folder / name, config.encode())
        if known is None:
            known = {
                "id": continued or uuid.uuid4().hex[:12],
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seed": seed,
            }
            known |= {"config": name, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
            write_atomically(folder / RUN_FILE, (json.dumps(known, indent=2) + "\n").encode())
        self.id = continued or known["id"]

    def _check_continues(self, start: Candidate | None, named: bool) -> str | None:
        """Return the id of the run whose checkpoints are there; None for a new run; refuse to mix them with others."""
        own = [folder for folder in self.folders if folder.parent not in self.folders]
        found = {one.path.resolve(): one for folder in own for one in find_checkpoints(folder)}
        present = sorted(found.values(), key=lambda one: one.step)
        if not present:
            return None
        folder, last = present[-1].path.parent, present[-1]
        other = "or give this run a folder of its own (--trainer.logger.init_args.version NAME)"
        if start is None:
            raise ValueError(
                f"'{folder}' holds checkpoints of an earlier training ({last.path.name}): resume it with"
                f" `--ckpt_path {folder}`, {other}."
            )
        check_one_run(folder, [*present, start])
        if start.path not in found and start.run is None:
            raise ValueError(f"'{folder}' holds other checkpoints than '{start.path}': move them, {other}.")
        if named and start.step < last.step and damage(last.path) is None:
            raise ValueError(
                f"`ckpt_path` '{start.path}' goes back to step {start.step:.0f}, and '{last.path}' of step"
                f" {last.step:.0f} would still count as the newest: move it away, {other}."
            )
        return start.run


def _to_lock(folders: Sequence[Path]) -> list[Path]:
    """Folders of runs: whoever writes to the ``checkpoints`` of one writes to that run."""
    return list(dict.fromkeys(folder.parent if folder.name == "checkpoints" else folder for folder in folders))


def read_run(folder: Path) -> dict[str, Any] | None:
    """Read the identity of a run; None if the folder has none."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_bytes())
        return {**known, "id": str(known["id"])}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"'{path}' is damaged ({error}): restore it from a backup, or delete it.") from error


def _config_name(folder: Path, start: Candidate | None) -> str:
    """Return the name of a config that replaces no other one."""
    stem = f"config-resumed-at-step-{0 if start is None else start.step:.0f}"
    names = chain([CONFIG_FILE, f"{stem}.yaml"], (f"{stem}-{number}.yaml" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())


class RunMember(Callback):
    """Lets all processes begin from one checkpoint, and keeps the folders of a training until the last has ended."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        check_same_checkpoint(trainer)
        if stage == "fit":
            folders = trainer.strategy.broadcast(self._run.folders)
            if not trainer.is_global_zero:
                self._run.join(folders, trainer.global_rank)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not trainer.is_global_zero:
            self._run.leave()
