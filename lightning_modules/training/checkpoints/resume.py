"""Where a run keeps its checkpoints, and from which of them another one resumes."""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_modules.training.checkpoints.io import check_checkpoint, newest_checkpoint
from lightning_modules.training.checkpoints.sharded import is_sharded
from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.files import writable_folder

_log = logging.getLogger(__name__)


def find_checkpoint(path: str | None, trainer: Trainer, logger: Any, *, resume: bool = True) -> str | None:
    """Return the checkpoint that ``--ckpt_path`` asks for; None to start a new training.

    The path is a complete checkpoint, or the folder of a run (``last`` for that of this run), in which the complete one
    of the largest step is chosen; other names (``best``) are Lightning's. The logger's configuration decides whether
    each start has a new folder. To ``resume``, weights alone are not enough. Content is compared when loaded.
    """
    if path is None or path in ("best", "hpc"):
        return path
    folder = _own_folder(trainer, logger) if path == "last" else Path(path).expanduser()
    if path != "last" and (not folder.is_dir() or is_sharded(folder)):
        check_checkpoint(path, resume=resume)
        return path
    found = newest_checkpoint(folder, resume=resume)
    if found is None and (path != "last" or not resume):
        raise ValueError(f"`ckpt_path: {path}` finds no checkpoint in '{folder}'. Name a file or the folder of a run.")
    _log.info("Resuming from %s." if found else "No checkpoint in %s yet: starting a new training.", found or folder)
    return None if found is None else str(found)


def check_same_checkpoint(trainer: Trainer) -> None:
    """Refuse to start if the processes of a run do not resume from the same checkpoint.

    Each looks for it by itself, and may find another one on a disk of its own node, or on a file server that lags.
    """
    found = gathered(trainer.ckpt_path and os.path.abspath(trainer.ckpt_path))
    other = next((rank for rank, path in enumerate(found) if path != found[0]), None)
    if other is not None:
        raise ValueError(
            f"`ckpt_path`: process 0 resumes from {found[0] or 'nothing'}, process {other} from"
            f" {found[other] or 'nothing'}. Keep checkpoints on a disk that all nodes see, and name the file."
        )


def check_checkpoint_folders(trainer: Trainer) -> None:
    """Try to write where checkpoints and logs will go: better now than after an hour of training."""
    logs = [Path(logger.save_dir) for logger in trainer.loggers if logger.save_dir]
    for folder in (*_folders(trainer), *logs) if trainer.is_global_zero else ():
        if not is_remote(folder):
            # Loggers choose names when training starts: it is enough that folders can be made.
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            writable_folder(existing, remedy="Set `dirpath` of the checkpoint callback, or `save_dir` of the logger.")


def say_how_to_go_on(trainer: Trainer) -> None:
    """Log what of a stopped training is saved, and the command that resumes it."""
    if not trainer.is_global_zero or trainer.global_step == 0:
        return
    callbacks = [callback for callback in _callbacks(trainer) if not callback.save_weights_only]
    newest = max(callbacks, key=lambda callback: callback._last_global_step_saved, default=None)
    saved = 0 if newest is None else newest._last_global_step_saved
    if newest is None or not saved:
        _log.warning(
            "Stopped at step %s, of which nothing is saved: a `callbacks.StepCheckpoint` with `save_on_exception: true`"
            " saves where a run is stopped, as in configs/base.yaml.",
            trainer.global_step,
        )
        return
    lost = "" if saved == trainer.global_step else f", of which {saved} are saved"
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--ckpt_path")
    command = shlex.join([*option.parse_known_args(sys.argv[1:])[1], "--ckpt_path", str(newest.dirpath)])
    _log.info("Stopped at step %s%s. Resume with:\nlongce %s", trainer.global_step, lost, command)


def goes_on(path: str | None, trainer: Trainer) -> bool:
    """Whether another run with this ``--ckpt_path`` would resume from what this one has saved."""
    if path is None or path == "last":
        return path == "last"
    own = {folder.absolute() for folder in _folders(trainer)}
    return not own.isdisjoint({Path(path).expanduser().absolute(), Path(path, "checkpoints").expanduser().absolute()})


def _own_folder(trainer: Trainer, logger: Any) -> Path:
    """Return the folder in which this run keeps its checkpoints."""
    folder = next(_folders(trainer), None)
    if folder is None:
        raise ValueError("`ckpt_path: last` needs a checkpoint callback in `trainer.callbacks`.")
    if is_numbered(logger) and not any(callback.dirpath for callback in _callbacks(trainer)):
        raise ValueError(
            "`ckpt_path: last` looks in the folder of this run, and the logger makes a new one at each start. Name the"
            f" folder of the run to resume (--ckpt_path {folder.parent.parent}/..), or give this run a name"
            " (--trainer.logger.init_args.version NAME)."
        )
    return folder


def is_numbered(logger: Any) -> bool:
    """Whether a logger of this configuration numbers its runs."""
    first = logger[0] if isinstance(logger, list) and logger else logger
    return first is not False and (first in (None, True) or first.init_args.get("version") is None)


def _callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of a run, in which Lightning puts logs and checkpoints by default."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def owned_folders(trainer: Trainer) -> list[Path]:
    """Return the local folders that a training writes to, its own one first.

    The working folder belongs to the user. A logger that numbers its runs on a server has no folder yet.
    """
    named = not trainer.loggers or None not in (trainer.loggers[0].name, trainer.loggers[0].version)
    found = [run_folder(trainer)] if named else []
    found += [folder for folder in _folders(trainer) if named or folder.parent != run_folder(trainer)]
    local = [folder.expanduser().absolute() for folder in found if not is_remote(folder)]
    return [folder for folder in dict.fromkeys(local) if folder.resolve() != Path.cwd()]


def is_remote(folder: Path) -> bool:
    """Whether a path was an address such as ``s3://bucket``, of which `Path` keeps one slash."""
    return re.match(r"\w+:/", str(folder)) is not None


def _folders(trainer: Trainer) -> Iterator[Path]:
    """Yield where the checkpoint callbacks of a run save, as they find out when training starts."""
    for callback in _callbacks(trainer):
        yield Path(callback.dirpath) if callback.dirpath is not None else run_folder(trainer) / "checkpoints"
