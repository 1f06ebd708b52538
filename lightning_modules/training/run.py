"""A training run: a folder with an id and a config, to which one job at a time writes."""

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
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from typing_extensions import override

from lightning_modules.training.checkpoints.io import (
    SUFFIX,
    Candidate,
    check_one_run,
    describe_checkpoint,
    find_checkpoints,
    find_damage,
)
from lightning_modules.training.checkpoints.resume import check_same_checkpoint, is_numbered
from lightning_modules.training.checkpoints.spans import CONFIG_FILE, SPANS_FILE, Span, write_spans
from lightning_modules.utilities.files import remove_unfinished, undamaged, write_atomically
from lightning_modules.utilities.locks import RunLock

RUN_FILE = "run.json"
"""File in the folder of a run with its id, seed and config, written once."""

UNSTARTED_FILE = ".unstarted.json"
"""File in the folder of a run whose present start has trained no step yet, with what the folder contained before it."""

_RECORDS = (
    *(RUN_FILE, SPANS_FILE, "hparams.yaml", "metrics.csv", "numerics.json", "config-resumed-at-step-*.yaml"),
    *("events.out.tfevents.*", "documents/*-step-*.parquet"),
)
"""What a start writes into the folder of its run, beside its config and checkpoints."""

log = logging.getLogger(__name__)


class Run:
    """The local folders of a training, locked from before its first write until its last process ends.

    The first folder gets ``run.json`` and ``config.yaml``, both written once. A resumed run keeps them, and adds its
    config as ``config-resumed-at-step-N.yaml``, and ``spans.json`` with the settings that changed. `record` sets the
    run's ``id``, which is stored in its checkpoints.

    A start without a checkpoint cannot be resumed: the next start in its folder replaces it, and moves its records to
    ``unfinished-N``. A ``provisional`` start that trains no step leaves nothing at all, even if it is killed.
    """

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.id: str | None = None
        self._lock = RunLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": RunLock()}  # only the launching process holds the lock

    def begin(self, folders: Sequence[Path], *, provisional: bool = False) -> None:
        """Lock the folders, in the first process; raise a ``ValueError`` that names the process of another run.

        What a ``provisional`` start writes is removed when it ends, unless `confirm` is called before.
        """
        self.folders = list(folders)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(*_find_folders_to_lock(folders))
        self._lock.begin()
        for folder in folders:
            remove_unfinished(folder, f"*{SUFFIX}")
            remove_unstarted(folder)
        if provisional and folders:
            _mark_unstarted(folders[0])

    def confirm(self) -> None:
        """Keep what this start has written: it has trained a step."""
        for folder in self.folders[:1]:
            (folder / UNSTARTED_FILE).unlink(missing_ok=True)

    def join(self, folders: Sequence[Path], rank: int) -> None:
        """Share the lock, in every other process."""
        shared = (folder for folder in _find_folders_to_lock(folders) if folder.is_dir())  # on a disk of all nodes
        self._lock = RunLock(*shared)
        self._lock.join(rank)

    def leave(self) -> None:
        """Release the lock; nothing is written from now on."""
        if self._lock.is_held:
            for folder in self.folders[:1]:
                remove_unstarted(folder)
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
        """Write id, config (YAML) and spans, in the first process; refuse folders with checkpoints of another training.

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
            write_spans(folder, spans, name)
        if known is None:
            known = {
                "id": continued or uuid.uuid4().hex[:12],
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "seed": seed,
            }
            known |= {"config": name, "config_sha256": hashlib.sha256(config.encode()).hexdigest()}
            write_atomically(folder / RUN_FILE, (json.dumps(known, indent=2) + "\n").encode())
        self.id = continued or known["id"]

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


def _list_records(folder: Path) -> list[str]:
    """Return what starts have written into the folder of a run, as paths relative to it."""
    found = (path for pattern in (CONFIG_FILE, *_RECORDS) for path in folder.glob(pattern))
    return sorted(str(path.relative_to(folder)) for path in found)


def _list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for pattern in ("", "checkpoints/") for path in folder.glob(f"{pattern}*{SUFFIX}"))


def _mark_unstarted(folder: Path) -> None:
    """Note what the folder of a run contains before a start, until the start has trained a step."""
    spans = folder / SPANS_FILE
    before = {"records": _list_records(folder), "spans": spans.read_text() if spans.is_file() else None}
    before["checkpoints"] = _list_checkpoints(folder)
    write_atomically(folder / UNSTARTED_FILE, json.dumps(before).encode())


def remove_unstarted(folder: Path) -> None:
    """Remove what a start that trained no step has written into the folder of its run, which must be locked.

    Nothing is removed beside checkpoints that were not there before, as in a copy of a run over such a start.
    """
    mark = folder / UNSTARTED_FILE
    if not mark.is_file():
        return
    with undamaged(mark):
        before = json.loads(mark.read_bytes())
    if not set(_list_checkpoints(folder)) <= set(before["checkpoints"]):
        mark.unlink()
        return
    for name in set(_list_records(folder)) - set(before["records"]):
        (folder / name).unlink()
    if before["spans"] is not None:
        write_atomically(folder / SPANS_FILE, before["spans"].encode())
    for name in ("documents", "checkpoints"):
        with suppress(OSError):  # it does not exist, or earlier starts use it
            (folder / name).rmdir()
    mark.unlink()


def remove_unstarted_versions(trainer: Trainer, config: Any) -> None:
    """Remove the last folders of a logger that numbers its runs, by its config, if no step was trained in them."""
    if not is_numbered(config) or not isinstance(trainer.logger, CSVLogger | TensorBoardLogger):
        return
    root = Path(trainer.logger.root_dir)
    numbers = [name.removeprefix("version_") for name in (path.name for path in root.glob("version_*"))]
    for number in sorted((int(number) for number in numbers if number.isdecimal()), reverse=True):
        folder = root / f"version_{number}"
        lock = RunLock(folder)
        if not (folder / UNSTARTED_FILE).is_file():
            return
        try:
            lock.begin(patience=0.1)
        except ValueError:  # it has only just started
            return
        remove_unstarted(folder)
        lock.leave()
        try:
            folder.rmdir()
        except OSError:  # it contains files of the user
            return


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
    if (folder / UNSTARTED_FILE).is_file():
        _mark_unstarted(folder)


class RunMember(Callback):
    """Makes all processes start from the same checkpoint, and share the lock on the run's folders.

    The first optimizer step confirms the start, and so does an evaluation that a resumed run repeats: its results are
    in no other start.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first_step: int | None = None  # the run's step when this start began, until it has trained a step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._first_step is not None and trainer.global_step > self._first_step:
            self._first_step = None
            self._confirm(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._confirm(trainer)

    def _confirm(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
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
