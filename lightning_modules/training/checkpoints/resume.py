"""Folders of a run's checkpoints, and the choice of the checkpoint to resume from."""

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
from lightning.pytorch.utilities import rank_zero_info

from lightning_modules.training.checkpoints.io import check_checkpoint, newest_checkpoint
from lightning_modules.training.checkpoints.sharded import is_sharded
from lightning_modules.utilities.collectives import gathered
from lightning_modules.utilities.files import writable_folder

_log = logging.getLogger(__name__)


def find_checkpoint(path: str | None, trainer: Trainer, logger: Any, *, resume: bool = True) -> str | None:
    """Return the checkpoint for ``--ckpt_path``, or None to start a new training.

    The path is a complete checkpoint, or the folder of a run (``last`` for this run's), of which the complete one with
    the largest step is used; Lightning handles ``best``. The logger's configuration decides whether each start gets a
    new folder. To ``resume``, weights alone are not sufficient.
    """
    if path is None or path in ("best", "hpc"):
        return path
    folder = _find_own_folder(trainer, logger) if path == "last" else Path(path).expanduser()
    doing = "Resuming from" if resume else "Weights of"
    if path != "last" and (not folder.is_dir() or is_sharded(folder)):
        check_checkpoint(path, resume=resume)
        rank_zero_info(f"{doing} {path}.")
        return path
    newest = newest_checkpoint(folder, resume=resume)
    if newest is None and (path != "last" or not resume):
        raise ValueError(
            f"`ckpt_path: {path}`: no checkpoint was found in '{folder}'. Use a file or the folder of a run."
        )
    found = f"{doing} {newest}." if newest else f"No checkpoint in {folder} yet: starting a new training."
    rank_zero_info(found)
    return None if newest is None else str(newest)


def check_same_checkpoint(trainer: Trainer) -> None:
    """Raise a ``ValueError`` if the processes of a run resume from different checkpoints.

    Each process searches for itself, and may find a different one on a local disk or a slow file server.
    """
    paths = gathered(trainer.ckpt_path and os.path.abspath(trainer.ckpt_path))
    other = next((rank for rank, path in enumerate(paths) if path != paths[0]), None)
    if other is not None:
        raise ValueError(
            f"`ckpt_path`: process 0 resumes from {paths[0] or 'nothing'}, process {other} from"
            f" {paths[other] or 'nothing'}. Keep checkpoints on a disk that all nodes share, and pass the file."
        )


def check_checkpoint_folders(trainer: Trainer) -> None:
    """Check that the folders for checkpoints and logs are writable, before hours of training."""
    logs = [Path(logger.save_dir) for logger in trainer.loggers if logger.save_dir]
    for folder in (*_checkpoint_folders(trainer), *logs) if trainer.is_global_zero else ():
        if not is_remote(folder):
            # Loggers choose the final names later, so the nearest existing parent is tested.
            existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            writable_folder(existing, remedy="Set `dirpath` of the checkpoint callback, or `save_dir` of the logger.")


def log_resume_command(trainer: Trainer) -> None:
    """Log the last saved step of a stopped training, and the command that resumes it."""
    if not trainer.is_global_zero or trainer.global_step == 0:
        return
    callbacks = [callback for callback in _checkpoint_callbacks(trainer) if not callback.save_weights_only]
    newest = max(callbacks, key=lambda callback: callback._last_global_step_saved, default=None)
    saved = 0 if newest is None else newest._last_global_step_saved
    if newest is None or not saved:
        _log.warning(
            "Stopped at step %s without a checkpoint: use a `callbacks.StepCheckpoint` with `save_on_exception: true`,"
            " as in configs/base.yaml, to save where a run is stopped.",
            trainer.global_step,
        )
        return
    lost = "" if saved == trainer.global_step else f"; the last checkpoint is of step {saved}"
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--ckpt_path")
    command = shlex.join([*option.parse_known_args(sys.argv[1:])[1], "--ckpt_path", str(newest.dirpath)])
    _log.info("Stopped at step %s%s. Resume with:\nlongce %s", trainer.global_step, lost, command)


def would_resume(path: str | None, trainer: Trainer) -> bool:
    """Return whether another run with this ``--ckpt_path`` would resume from the checkpoints of this one."""
    if path is None or path == "last":
        return path == "last"
    own = {folder.absolute() for folder in _checkpoint_folders(trainer)}
    return not own.isdisjoint({Path(path).expanduser().absolute(), Path(path, "checkpoints").expanduser().absolute()})


def _find_own_folder(trainer: Trainer, logger: Any) -> Path:
    """Return the folder of this run's checkpoints."""
    folder = next(_checkpoint_folders(trainer), None)
    if folder is None:
        raise ValueError("`ckpt_path: last` needs a checkpoint callback in `trainer.callbacks`.")
    if is_numbered(logger) and not any(callback.dirpath for callback in _checkpoint_callbacks(trainer)):
        raise ValueError(
            "`ckpt_path: last` searches the folder of this run, but the logger makes a new folder at each start. Pass"
            f" the folder of the run to resume (--ckpt_path {folder.parent.parent}/..), or name this run"
            " (--trainer.logger.init_args.version NAME)."
        )
    return folder


def is_numbered(logger: Any) -> bool:
    """Return whether a logger with this configuration numbers its runs."""
    first = logger[0] if isinstance(logger, list) and logger else logger
    return first is not False and (first in (None, True) or first.init_args.get("version") is None)


def _checkpoint_callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def run_folder(trainer: Trainer) -> Path:
    """Return the folder in which Lightning puts a run's logs and checkpoints by default."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def owned_folders(trainer: Trainer) -> list[Path]:
    """Return the local folders that a training writes to, the run's folder first.

    The working folder belongs to the user and is omitted. A logger whose server numbers the runs has no folder yet.
    """
    named = not trainer.loggers or None not in (trainer.loggers[0].name, trainer.loggers[0].version)
    folders = [run_folder(trainer)] if named else []
    folders += [folder for folder in _checkpoint_folders(trainer) if named or folder.parent != run_folder(trainer)]
    local = [folder.expanduser().absolute() for folder in folders if not is_remote(folder)]
    return [folder for folder in dict.fromkeys(local) if folder.resolve() != Path.cwd()]


def is_remote(folder: Path) -> bool:
    """Return whether a path was a URL such as ``s3://bucket``; `Path` drops one of its slashes."""
    return re.match(r"\w+:/", str(folder)) is not None


def _checkpoint_folders(trainer: Trainer) -> Iterator[Path]:
    """Yield the folders of the checkpoint callbacks, as they choose them when training starts."""
    for callback in _checkpoint_callbacks(trainer):
        yield Path(callback.dirpath) if callback.dirpath is not None else run_folder(trainer) / "checkpoints"
