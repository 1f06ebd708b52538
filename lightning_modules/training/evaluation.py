"""Where ``longce validate``, ``test`` and ``predict`` write: never among the files of a run."""

import logging
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_modules.training.checkpoints.io import contents, describe
from lightning_modules.training.checkpoints.resume import is_remote, run_folder
from lightning_modules.training.run import CONFIG_FILE, RUN_FILE
from lightning_modules.utilities.files import writable_folder, write_atomically

FOLDER = "evaluations"

_log = logging.getLogger(__name__)


def at_checkpoint_step(trainer: Trainer, checkpoint: Path) -> None:
    """Let an evaluation log at the step and epoch of its checkpoint."""
    loops = contents(checkpoint).get("loops", {})
    if "fit_loop" in loops:
        trainer.fit_loop.load_state_dict(loops["fit_loop"])
        # Lightning's count for loggers lags by one when a checkpoint is saved.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def place_evaluation(trainer: Trainer, command: str, checkpoint: Path | None, config: str, *, numbered: bool) -> None:
    """Make a folder for the logs and the config of an evaluation, in its first process, and send the loggers there.

    It is ``evaluations/COMMAND-step-N`` in the folder of the checkpoint's run, or in that of the logger (above it, if
    the logger is ``numbered``: makes a new folder at each start). Loggers that write elsewhere are left alone.
    """
    base = _base(trainer, checkpoint, numbered)
    if base is None:
        return
    name = command if checkpoint is None else f"{command}-step-{describe(checkpoint).step:.0f}"
    folder = _new_folder(base / FOLDER, name)
    trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]  # callbacks write there without a logger
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            logger._root_dir = str(base)
            logger._name, logger._version = FOLDER, folder.name
        if isinstance(logger, CSVLogger):
            logger._save_dir = str(base)
    write_atomically(folder / CONFIG_FILE, config.encode())
    _log.info("Logs and config of this evaluation: %s", folder)


def _base(trainer: Trainer, checkpoint: Path | None, numbered: bool) -> Path | None:
    """Folder to put evaluations into; None for a run without logs in the user's working folder."""
    if checkpoint is not None and (run := _run_of(checkpoint)) is not None:
        try:
            return writable_folder(run / FOLDER, remedy="").parent
        except ValueError:
            _log.info("%s is read-only.", run)
    base = run_folder(trainer)
    if is_remote(base):
        return None
    base = base.parent if trainer.loggers and numbered else base
    return base if trainer.loggers or base.resolve() != Path.cwd() else None


def _run_of(checkpoint: Path) -> Path | None:
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder if (folder / RUN_FILE).exists() else None


def _new_folder(parent: Path, name: str) -> Path:
    folder, number = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
