"""Identity of a run for its loggers: config, code, model and data, with the best values of its evaluations."""

import math
import re
import subprocess
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import hub_commit, model_identity
from lightning_modules.models.loading.load import has_weights
from lightning_modules.training.checkpoints.resume import run_folder
from lightning_modules.training.checkpoints.spans import flatten_config
from lightning_modules.training.facts import run_facts
from lightning_modules.utilities.files import atomic_file
from lightning_modules.utilities.identity import combined_hash, package_version

EXPERIMENT_TAG = "_hparams_/experiment"
SESSION_START_INFO_TAG = "_hparams_/session_start_info"
"""Tags of TensorBoard's HPARAMS tab."""
SHOWN = (
    "data.init_args.sequence_length",
    "model.objective.class_path",
    "model.optimizer.init_args.lr",
    "model.pretrained_model_name_or_path",
    "run.tokens_per_step",
)
"""Settings that the HPARAMS tab of TensorBoard shows at first; it offers all others in its left column."""


class RunIdentity(Callback):
    """Logs the config and identity of a run as hyperparameters, and ``best/..`` for each LongPPL and perplexity.

    ``config`` is the YAML text of the full config; without it, nothing is logged.
    """

    def __init__(self) -> None:
        self.config = ""
        self._values: dict[str, Any] = {}
        self._best: dict[str, float] = {}
        self._has_tab = False  # whether TensorBoard knows the metrics
        self._first_step: int | None = None  # the run's step when this start began, until it has trained a step

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.config or not trainer.is_global_zero:
            return
        pl_module._log_hyperparams = False  # Lightning would log the model's arguments once more
        self._values = {**flatten_config(yaml.safe_load(self.config)), **_identify_run(trainer, pl_module)}
        parameters = self._values["run.parameters"]
        trained = self._values["run.trained_parameters"]
        rank_zero_info(f"{parameters / 1e6:,.2f}M parameters, of which {trained / 1e6:,.2f}M are trained.")
        for logger in trainer.loggers:
            _log_hyperparameters(logger, self._values)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step  # before, a resumed run has not restored it yet

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Remove the settings of earlier starts after the first step: TensorBoard shows the first ones it finds."""
        if not self._values or self._first_step is None or trainer.global_step == self._first_step:
            return
        self._first_step = None
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                _remove_earlier_settings(logger)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._values or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        found = [name for name in metrics if re.fullmatch(r"val/(.+/)?(longppl|perplexity)", name)]
        found.sort(key=lambda name: name.endswith("perplexity"))  # LongPPL first
        bests = {}
        for name in found:
            best = name.replace("val/", "best/", 1)
            if metrics[name].isnan() and best not in self._best:
                continue  # a set without key tokens has no LongPPL: its columns would be empty
            bests[name] = best
            self._best[best] = float(np.fmin(float(metrics[name]), self._best.get(best, math.nan)))
        for logger in trainer.loggers:
            logger.log_metrics(self._best, step=trainer.fit_loop.epoch_loop._batches_that_stepped)  # as for `metrics`
            if not self._has_tab and isinstance(logger, TensorBoardLogger):
                _add_hparams_tab(logger, self._values, [*bests, *bests.values()])
            logger.save()  # as Lightning does after its own rows, or a kill would lose these
        self._has_tab = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the folder of the run."""
        if self._values and trainer.loggers and trainer.is_global_zero:
            rank_zero_info(f"The run is in {run_folder(trainer)}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return dict(self._best)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best = state_dict


def _identify_run(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the identities of code, model and data, and the sizes of the model and of an optimizer step."""
    model: Any = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    loading = vars(module).get("loading")
    data = getattr(trainer, "datamodule", None)
    rows = [getattr(data, "rows", None), *getattr(data, "mixed_rows", {}).values()]
    # Streamed sequences have no identity before they are read, and custom rows may not define one.
    identities = [part.identity() for part in rows if callable(getattr(part, "identity", None))]
    weights = list(module.parameters())
    values = {
        "id": getattr(module, "run_id", None),
        "commit": git_commit(Path.cwd()),
        "longce": package_version("longce"),
        "longce_commit": git_commit(Path(__file__).parent),
        "model": identify_model(loading) if isinstance(loading, ModelConfig) else None,
        "data": f"sha256:{combined_hash(identities)}" if identities else None,
        # transformers counts quantized weights, which are packed
        "parameters": model.num_parameters() if model else sum(each.numel() for each in weights),
        "trained_parameters": sum(each.numel() for each in weights if each.requires_grad),
        "tokens_per_step": run_facts(trainer, None)["tokens_per_step"],
    }
    return {f"run.{name}": value for name, value in values.items() if value is not None}


def identify_model(loading: ModelConfig) -> str | None:
    """Return the commit of a model on the hub, or the hash of a local one; None for random weights."""
    path = str(loading.pretrained_model_name_or_path)
    if not has_weights(loading.pretrained_model_name_or_path):
        return None
    if Path(path).is_dir():
        return model_identity(loading)
    with suppress(ValueError):  # a read-only cache has no commits
        return hub_commit(path, loading.revision, fetched=True)
    return None


def git_commit(folder: Path) -> str | None:
    """Return the commit of the repository that a folder is in, with ``-dirty`` after uncommitted changes, or None."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _log_hyperparameters(logger: Logger, values: dict[str, Any]) -> None:
    if isinstance(logger, TensorBoardLogger):  # the logger itself would add a metric to the curves at step 0
        logger.hparams.update(values)
        _add_hparams_tab(logger, values)
        return
    if isinstance(logger, MLFlowLogger):  # it refuses other values than those of the run's first start
        known = logger.experiment.get_run(logger.run_id).data.params
        values = {name: value for name, value in values.items() if name not in known}
    logger.log_hyperparams(values)


def _remove_earlier_settings(logger: TensorBoardLogger) -> None:
    own = logger.experiment._get_file_writer().event_writer._file_name
    for file in Path(logger.log_dir).glob("events.out.tfevents.*"):
        if file.name != Path(own).name:
            _remove_events(file, (EXPERIMENT_TAG, SESSION_START_INFO_TAG))


def _remove_events(file: Path, tags: Collection[str]) -> None:
    """Remove the events with these tags from an event file that is not in use."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    names = [tag.encode() for tag in tags]
    events = list(RawEventFileLoader(str(file)).Load())
    kept = [event for event in events if not any(name in event for name in names)]
    if len(kept) == len(events):
        return
    # Each event has 16 bytes of framing. TensorBoard reads up to a damaged or unfinished event; the rest is kept.
    intact = sum(16 + len(event) for event in events)
    rest = file.read_bytes()[intact:]
    with atomic_file(file) as stream:
        writer = RecordWriter(stream)
        for event in kept:
            writer.write(event)
        stream.write(rest)


def _add_hparams_tab(logger: TensorBoardLogger, values: Mapping[str, Any], metrics: Collection[str] = ()) -> None:
    """Add the run to the HPARAMS tab, with these metrics once they are known.

    The tab shows the last point of each metric's curve, even for a run that was killed.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    shown = dict(values)
    for name, value in values.items():
        if isinstance(value, bool):  # which torch treats as a number
            shown[name] = str(value).lower()
        elif name.endswith("class_path"):  # the tab's columns are narrow
            shown[name] = value.rpartition(".")[2]
    experiment, start, _ = hparams(shown, dict.fromkeys(metrics, 0.0))
    content = HParamsPluginData.FromString(experiment.value[0].metadata.plugin_data.content)
    for setting in content.experiment.hparam_infos:
        setting.differs = setting.name in SHOWN  # TensorBoard sorts by this, and shows five
    experiment.value[0].metadata.plugin_data.content = content.SerializeToString()
    logger.experiment._get_file_writer().add_summary(experiment if metrics else start)
