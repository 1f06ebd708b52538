"""A training run: a folder with an id and a config, written by one job at a time."""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
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
    describe_checkpoint,
    find_checkpoints,
    find_damage,
)
from lightning_modules.training.checkpoints.resume import check_same_checkpoint
from lightning_modules.training.checkpoints.spans import CONFIG_FILE, SPANS_FILE, Span, write_spans
from lightning_modules.utilities.files import remove_unfinished, undamaged, write_atomically
from lightning_modules.utilities.locks import RunLock

RUN_FILE = "run.json"
"""File in the folder of a run with its id, seed and config, written once."""

_RECORDS = (
    *(RUN_FILE, SPANS_FILE, "hparams.yaml", "metrics.csv", "numerics.json", "config-resumed-at-step-*.yaml"),
    *("events.out.tfevents.*", "documents/*-step-*.parquet", "answers/*-step-*.parquet"),
)
"""Files that are written to the folder of a run when it starts, in addition to its config and checkpoints."""

log = logging.getLogger(__name__)


class Run:
    """The local folders of a training, locked from before its first write until its last process ends.

    The first folder gets ``run.json`` and ``config.yaml``, both written once. A resumed run keeps them, and adds its
    config as ``config-resumed-at-step-N.yaml``, and ``spans.json`` with the settings that changed. `record` sets the
    run's ``id``, which is stored in its checkpoints.

    A start without a checkpoint cannot be resumed: the next start in its folder replaces it, and moves its records to
    ``unfinished-N``.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.id: str | None = None
        self._lock = RunLock()
        self._unwritten: tuple[Sequence[Span], str] | None = None  # spans and config of this start

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": RunLock()}  # only the launching process holds the lock

    def begin(self, folders: Sequence[Path]) -> None:
        """Lock the folders, in the first process; raise a ``ValueError`` that names the process of another run."""
        self.folders = list(folders)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(*_find_folders_to_lock(folders))
        self._lock.begin()
        for folder in folders:
            remove_unfinished(folder, f"*{SUFFIX}")

    def join(self, folders: Sequence[Path], rank: int) -> None:
        """Share the lock, in every other process."""
        shared = (folder for folder in _find_folders_to_lock(folders) if folder.is_dir())  # on a disk of all nodes
        self._lock = RunLock(*shared)
        self._lock.join(rank)

    def leave(self) -> None:
        """Release the lock; the run does not write from now on."""
        self._lock.leave()
        for folder in reversed(self.folders):
            with suppress(OSError):  # only empty folders can be removed: those of a run that never started
                folder.rmdir()

    def record(
        self,
        checkpoint: Path | None,
        config: str,
        seed: int | None,
        *,
        spans: Sequence[Span] = (),
        named: bool = False,
    ) -> None:
        """Write id and config (YAML), in the first process; refuse folders with checkpoints of another training.

        Training resumes from ``checkpoint``, which is the newest one unless the user ``named`` it.
        """
        start = None if checkpoint is None else describe_checkpoint(checkpoint.resolve())
        existing = self._find_existing()
        continued = self._check_resumes(existing, start, named)
        if not self.folders:
            return
        folder = self.folders[0]
        known = read_run(folder)
        if known is not None and not existing and (start is None or start.run != known["id"]):
            _set_aside(folder, known)
            known = None
        name = _choose_config_name(folder, start)
        write_atomically(folder / name, config.encode())
        if spans:
            self._unwritten = (spans, name)
        if known is None:
            known = {
                "id": continued or uuid.uuid4().hex[:12],
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seed": seed,
            }
            known |= {"config": name, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
            write_atomically(folder / RUN_FILE, (json.dumps(known, indent=2) + "\n").encode())
        self.id = continued or known["id"]

    def confirm(self) -> None:
        """Write the spans: a step was trained with the config of this start."""
        if self._unwritten is not None:
            write_spans(self.folders[0], *self._unwritten)
            self._unwritten = None

    def _find_existing(self) -> dict[Path, Candidate]:
        """Return the checkpoints in the folders, by path."""
        top_level = [folder for folder in self.folders if folder.parent not in self.folders]
        return {one.path.resolve(): one for folder in top_level for one in find_checkpoints(folder)}

    def _check_resumes(self, existing: Mapping[Path, Candidate], start: Candidate | None, named: bool) -> str | None:
        """Return the id of the run that is resumed, or None for a new one; refuse to mix checkpoints of two runs."""
        present = sorted(existing.values(), key=lambda one: one.step)
        if not present:
            return None
        folder, last = present[-1].path.parent, present[-1]
        other = "or give this run another folder (--trainer.logger.init_args.version NAME)"
        if start is not None:
            check_one_run(folder, [*present, start])
        if start is None:
            problem = f"'{folder}' contains checkpoints of an earlier training ({last.path.name}): resume it with"
            problem += f" `--ckpt_path {folder}`"
        elif start.path not in existing and start.run is None:
            problem = f"'{folder}' contains other checkpoints than '{start.path}': move them"
        elif named and start.step < last.step and find_damage(last.path) is None:
            problem = f"`ckpt_path` '{start.path}' goes back to step {start.step:.0f}, but '{last.path}' of step"
            problem += f" {last.step:.0f} would still be the newest: move it away"
        else:
            return start.run
        raise ValueError(f"{problem}, {other}.")


def _find_folders_to_lock(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs; a ``checkpoints`` folder is locked through the run's."""
    return list(dict.fromkeys(folder.parent if folder.name == "checkpoints" else folder for folder in folders))


def read_run(folder: Path) -> dict[str, Any] | None:
    """Read the ``run.json`` of a folder; return None if it does not exist."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    with undamaged(path):
        known = json.loads(path.read_bytes())
        return {**known, "id": str(known["id"])}


def _choose_config_name(folder: Path, start: Candidate | None) -> str:
    """Return a file name for a config that does not exist yet."""
    stem = f"config-resumed-at-step-{0 if start is None else start.step:.0f}"
    names = chain([CONFIG_FILE, f"{stem}.yaml"], (f"{stem}-{number}.yaml" for number in count(2)))
    return next(name for name in names if not (folder / name).exists())


def _set_aside(folder: Path, known: Mapping[str, Any]) -> None:
    """Move the records of a start that left no checkpoint to ``unfinished-N``, with its config and evaluations."""
    aside = next(path for path in (folder / f"unfinished-{number}" for number in count(1)) if not path.exists())
    patterns = (str(known.get("config", CONFIG_FILE)), *_RECORDS, "evaluations/*-step-*")
    for path in [path for pattern in patterns for path in sorted(folder.glob(pattern))]:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # two patterns match it
            path.rename(target)
    log.info("An earlier start in %s left no checkpoint: its logs and config are now in %s.", folder, aside.name)


class RunMember(Callback):
    """Makes all processes start from the same checkpoint, and share the lock on the run's folders.

    The first optimizer step confirms the start.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first_step = 0  # the run's step when this start began
        self._is_confirmed = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step
        self._is_confirmed = False

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self._is_confirmed and trainer.is_global_zero and trainer.global_step > self._first_step:
            self._is_confirmed = True
            self._run.confirm()

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
