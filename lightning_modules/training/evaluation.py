"""Evaluations of a run: the names of their metrics, and their output folders, separate from the files of the run."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.metrics import LongPerplexity
from lightning_modules.training.checkpoints.io import describe_checkpoint, load_without_tensors
from lightning_modules.training.checkpoints.resume import is_remote, run_folder
from lightning_modules.training.run import CONFIG_FILE, RUN_FILE
from lightning_modules.utilities.files import writable_folder, write_atomically

EVALUATIONS_FOLDER = "evaluations"

_log = logging.getLogger(__name__)


def at_checkpoint_step(trainer: Trainer, checkpoint: Path) -> None:
    """Set the step and epoch for logging to those of the checkpoint."""
    loops = load_without_tensors(checkpoint).get("loops", {})
    if "fit_loop" in loops:
        trainer.fit_loop.load_state_dict(loops["fit_loop"])
        # Lightning's count for loggers lags by one when a checkpoint is saved.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def records_folder(trainer: Trainer) -> Path | None:
    """Return the folder of the run, for the records of an evaluation; None if this process does not write them."""
    dry_run = trainer.sanity_checking or getattr(trainer, "fast_dev_run", False)
    if not trainer.is_global_zero or dry_run or not trainer.loggers:
        return None
    folder = run_folder(trainer)
    if None in (trainer.loggers[0].name, trainer.loggers[0].version) or is_remote(folder):
        return None
    return folder


def validation_set_keys(trainer: Trainer) -> dict[str, str]:
    """Return the names of the data module's validation sets, each with its part of metric names.

    The part is empty for a single set. Without named sets, the only name is empty.
    """
    sets = {} if trainer.testing else getattr(trainer.datamodule, "validation_sets", None) or {}  # type: ignore[attr-defined]
    return {name: name if len(sets) > 1 else "" for name in sets} or {"": ""}


def new_perplexity(device: torch.device) -> LongPerplexity:
    """Return a metric that does not need an update, because other processes may have all documents of a set."""
    metric = LongPerplexity().to(device)
    metric.update(torch.zeros(1, device=device), torch.zeros(1, device=device))  # or torchmetrics would warn
    return metric


def new_perplexities(module: LightningModule) -> dict[str, LongPerplexity]:
    """Return a perplexity for each validation set."""
    return {name: new_perplexity(module.device) for name in validation_set_keys(module.trainer)}


def update_perplexities(perplexities: Mapping[str, LongPerplexity], batch: PackedBatch, log_likelihood: Tensor) -> None:
    """Add each sequence of a batch to the perplexity of its validation set, with ``[B, T]`` log-likelihoods."""
    scored = batch["labels"].ne(IGNORE_INDEX)
    for row, name in enumerate(batch.get("sets", [""] * len(scored))):
        if name in perplexities:
            perplexities[name].update(log_likelihood[row], scored[row])
        elif name or "text" not in batch or batch["text"][row]:  # empty: it only keeps processes in lockstep
            raise ValueError(
                f"A validation sequence is of the set {name!r}, but the data module's `validation_sets` are"
                f" {list(perplexities)}: correct `sets` of the batches, and evaluate with the data module."
            )


def log_perplexities(module: LightningModule, perplexities: Mapping[str, LongPerplexity], stage: str) -> None:
    """Log the perplexity of each validation set; ``stage`` is ``val`` or ``test``."""
    for name, key in validation_set_keys(module.trainer).items():
        perplexity = perplexities[name].compute().float()
        module.log(join_key(stage, key, "perplexity"), perplexity, prog_bar=not key, sync_dist=True)


def join_key(*parts: str) -> str:
    """Join the parts of a metric's name, without those that are empty."""
    return "/".join(filter(None, parts))


def place_evaluation(trainer: Trainer, command: str, checkpoint: Path | None, config: str, *, numbered: bool) -> None:
    """Create a folder for the logs and config of an evaluation, in its first process, and redirect the loggers there.

    It is ``evaluations/COMMAND-step-N`` in the folder of the checkpoint's run, or in that of the logger (above it if
    the logger is ``numbered`` and makes a new folder at each start). Other loggers are unchanged.
    """
    base = _find_base_folder(trainer, checkpoint, numbered)
    if base is None:
        return
    name = command if checkpoint is None else f"{command}-step-{describe_checkpoint(checkpoint).step:.0f}"
    folder = _create_folder(base / EVALUATIONS_FOLDER, name)
    trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]  # for callbacks, without a logger
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            logger._root_dir = str(base)
            logger._name = EVALUATIONS_FOLDER
            logger._version = folder.name
        if isinstance(logger, CSVLogger):
            logger._save_dir = str(base)
    write_atomically(folder / CONFIG_FILE, config.encode())
    _log.info("Logs and config of this evaluation: %s", folder)


def _find_base_folder(trainer: Trainer, checkpoint: Path | None, numbered: bool) -> Path | None:
    """Return the folder for ``evaluations``; None for a run without logs in the working folder."""
    if checkpoint is not None and (run := _find_run(checkpoint)) is not None:
        try:
            return writable_folder(run / EVALUATIONS_FOLDER, remedy="").parent
        except ValueError:
            _log.info("%s is read-only.", run)
    base = run_folder(trainer)
    if is_remote(base):
        return None
    base = base.parent if trainer.loggers and numbered else base
    return base if trainer.loggers or base.resolve() != Path.cwd() else None


def _find_run(checkpoint: Path) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to, if it is in one."""
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        return folder.parent
    return folder if (folder / RUN_FILE).exists() else None


def _create_folder(parent: Path, name: str) -> Path:
    """Create a folder with this name, or with a number after it if the name is taken."""
    folder = parent / name
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"
