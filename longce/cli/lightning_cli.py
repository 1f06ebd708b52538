"""LightningCLI for ``fit``, ``validate``, ``test`` and ``predict``, and for the commands that take their options."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonargparse
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tqdm.contrib.logging import logging_redirect_tqdm
from typing_extensions import override

from datamodules.influence.store import InfluenceStore
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.training.checkpoints.due_evaluation import DueEvaluation, ResumingTrainer
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO
from lightning_modules.training.checkpoints.resume import (
    check_checkpoint_folders,
    find_checkpoint,
    is_numbered,
    log_resume_command,
    owned_folders,
    would_resume,
)
from lightning_modules.training.checkpoints.spans import describe_for_checkpoint, resumed_spans
from lightning_modules.training.evaluation import at_checkpoint_step, place_evaluation
from lightning_modules.training.fsdp import check_strategy
from lightning_modules.training.monitoring.csv_metrics import keep_metrics
from lightning_modules.training.monitoring.identity import RunIdentity
from lightning_modules.training.monitoring.numerics import NumericsRecord
from lightning_modules.training.monitoring.progress import StepProgress
from lightning_modules.training.optimizers import LR_SCHEDULER, OPTIMIZER
from lightning_modules.training.preemption import EvaluationStop, Preemption
from lightning_modules.training.preflight import check_callbacks, check_influence, check_stored, check_trainer
from lightning_modules.training.random_states import RandomStates
from lightning_modules.training.run import Run, RunMember
from lightning_modules.training.sequence_parallel import sequence_parallel_size
from longce.cli.config_files import names_model_class
from longce.cli.experiment_parser import ExperimentParser
from longce.cli.slow_types import avoid_slow_settings, avoid_slow_weights
from longce.plan.plan import plan_checkpointing, plan_utilization

_DESCRIPTIONS = {
    "fit": "Fine-tune a model, and evaluate its LongPPL during training.",
    "validate": "Evaluate a model on the validation documents.",
    "test": "Evaluate a model on the test documents.",
    "predict": "Write the long- and short-context log-likelihoods of every token of the test documents.",
}
_CKPT_PATH_HELP = "Checkpoint file, the folder of a run (its newest valid checkpoint), or ``last`` for the newest valid"
_CKPT_PATH_HELP += " checkpoint of this run."


class LongceCLI(LightningCLI):
    """LightningCLI in which the command line takes precedence over everything, including the checkpoint.

    ``model`` holds the settings of a `LongContextLM`, or class and settings of any LightningModule.

    Args:
        add_options: Adds further options of a command.
        run: Whether to run the command; otherwise its options are only parsed, and `make` instantiates a part.
        trainer_class: Trainer with the methods that the commands call.
        callbacks: Further callbacks.
    """

    def __init__(
        self,
        add_options: Callable[[LightningArgumentParser], None] = lambda parser: None,
        *,
        run: bool = True,
        trainer_class: type[Trainer] = ResumingTrainer,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._add_options = add_options
        logging.getLogger("lightning").handlers.clear()  # the root logger prints its messages already
        self.preemption = Preemption()
        self.training_run = Run()
        self.identity = RunIdentity()
        self._requested_checkpoint: str | None = None  # --ckpt_path, as it was given
        due = DueEvaluation(self.preemption.signal)
        own = [RunMember(self.training_run), RandomStates(), due, self.preemption, self.identity, NumericsRecord()]
        self._words = sys.argv[1:]
        self._names_class = names_model_class(self._words)
        try:
            super().__init__(
                LightningModule if self._names_class else LongContextLM,
                subclass_mode_model=self._names_class,
                trainer_class=trainer_class,
                run=run,
                auto_configure_optimizers=False,
                save_config_callback=None,  # `Run` saves it
                trainer_defaults={
                    "callbacks": [*own, *callbacks],
                    "enable_model_summary": False,  # a single row; `RunIdentity` logs the number of parameters
                },
                parser_class=ExperimentParser,
                parser_kwargs={"prog": "longce"},
            )
        finally:
            self.training_run.leave()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method in Lightning
        """Return only the requested command: a parser of all settings takes a tenth of a second."""
        known = {**LightningCLI.subcommands(), "influence": {"model", "datamodule"}}
        requested = self._words[:1]
        return {name: arguments for name, arguments in known.items() if name in requested}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Name the default optimizer and schedule by their classes: a saved config cannot hold the functions."""
        defaults = {"optimizer": OPTIMIZER, "lr_scheduler": LR_SCHEDULER}
        if self._names_class:  # configs may set options of the default class before the one that names another class
            path = f"{LongContextLM.__module__}.{LongContextLM.__name__}"
            parser.set_defaults({"model": {"class_path": path, "init_args": defaults}})
        else:
            parser.set_defaults({f"model.{name}": value for name, value in defaults.items()})
        self._add_options(parser)

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Replace Lightning's help for the commands and for ``--ckpt_path``, which works differently here."""
        kwargs["description"] = _DESCRIPTIONS.get(subcommand, kwargs.get("description"))
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.usage = f"longce {subcommand} -c CONFIG [-c CONFIG ..] [--KEY VALUE ..]"
        for action in parser._actions:
            if action.dest == "ckpt_path" and action.help is not argparse.SUPPRESS:
                action.help = _CKPT_PATH_HELP
        return parser

    @override
    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as given: Lightning would silently let a checkpoint override the command line."""

    @override
    def _set_seed(self) -> None:
        if self.subcommand is not None:
            super()._set_seed()

    @override
    def before_instantiate_classes(self) -> None:
        """Refuse a ``model`` that is not a mapping, and null where a class needs a value."""
        if not isinstance(self._get(self.config, "model"), jsonargparse.Namespace):
            raise ValueError("`model` must be a mapping of settings: correct it, or remove it to use the defaults.")
        # Without this setting, jsonargparse treats null like a missing value.
        jsonargparse.set_parsing_settings(unset_sentinel=True)
        try:
            self.parser.validate(self.config)
        except TypeError as error:
            self.parser.error(str(error), error)
        finally:
            jsonargparse.set_parsing_settings(unset_sentinel=False)
        check_strategy(self._get(self.config, "trainer").get("strategy"))
        if self.subcommand is not None:
            avoid_slow_settings(self.config[self.subcommand], self._words)

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand is not None:
            super().instantiate_classes()

    def make(self, name: str) -> Any:
        """Instantiate only the ``model`` or only the ``data`` of the config."""
        part = jsonargparse.Namespace({name: self.config[name].clone()})
        # The settings of a model without a class are a group, which would be instantiated even if it is missing.
        return self.parser.instantiate(part, instantiate_groups=name == "model")[name]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Use `CheckedCheckpointIO` and `StepProgress`, unless the config names other ones."""
        options = self._get(self.config_init, "trainer")
        check_trainer(options)
        plugins = _as_list(options.get("plugins"))
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(CheckedCheckpointIO())
        callbacks = [EvaluationStop(self.preemption.signal), *_as_list(options.get("callbacks"))]
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if options.get("enable_progress_bar") is not False and not has_progress_bar:
            callbacks.append(StepProgress())
        # Our data modules shard documents and sequences themselves, without repeating any.
        sampler = options.use_distributed_sampler and not getattr(self.datamodule, "shards_itself", False)
        given = {"plugins": plugins, "callbacks": callbacks, "use_distributed_sampler": sampler, **kwargs}
        if self.subcommand == "influence":
            given |= {"logger": False, "callbacks": [], "enable_checkpointing": False, "use_distributed_sampler": False}
        try:
            return super().instantiate_trainer(**given)
        except TypeError as error:  # Lightning raises it for some wrong values
            raise ValueError(f"The settings of `trainer` are not valid: {error}") from error

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as stopped:  # Lightning exits with status 1 after Ctrl-C, and 0 after SIGTERM
            if subcommand != "fit" and isinstance(stopped, SIGTERMException):
                sys.exit(128 + signal.SIGTERM)  # not 0: the results are incomplete
            if subcommand == "fit" or not isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            raise KeyboardInterrupt from stopped

    @override
    def after_instantiate_classes(self) -> None:
        """Refuse settings that cannot work, before anything is tokenized or loaded."""
        if self.subcommand in (None, "influence"):  # which check their own
            return
        check_strategy(self.trainer.strategy)
        fits = self.subcommand == "fit"
        options = self.config_init[self.subcommand]
        if isinstance(self.model, LongContextLM):
            self._check_model(self.model, fits=fits)
        logger = self._get(self.config, "trainer").logger
        if fits and self.trainer.is_global_zero and not self._is_dry_run:
            check_checkpoint_folders(self.trainer)
            self.training_run.begin(owned_folders(self.trainer))
        self._requested_checkpoint = options.ckpt_path
        if self.subcommand == "predict":
            options.return_predictions = False  # callbacks write them; those of a corpus would not fit in memory
        options.ckpt_path = find_checkpoint(options.ckpt_path, self.trainer, logger, resume=fits)
        checkpoint = None
        if options.ckpt_path not in (None, "best", "hpc"):
            checkpoint = Path(options.ckpt_path)
        self._save_config(checkpoint, logger)

    def _check_model(self, model: LongContextLM, *, fits: bool) -> None:
        check_callbacks(self.trainer.callbacks)  # type: ignore[attr-defined]
        rows = getattr(self.datamodule, "sequence_length", None) if fits else None
        pose = getattr(self.datamodule, "pose", None) if fits else None
        model.check_early(rows, sequence_parallel_size(self.trainer), None if pose is None else pose.target_length)
        avoid_slow_weights(model, self.trainer)
        if fits and model.loading.gradient_checkpointing == "auto":
            kind, layers = plan_checkpointing(model, self.config["fit"], self.trainer)
            model.loading = replace(model.loading, gradient_checkpointing=kind, checkpointed_layers=layers)
        if fits:
            model.optimization.check(self.trainer)
            curriculum = getattr(self.datamodule, "curriculum", None)
            if curriculum is not None and model.objective.uses_short_context:
                model.short_context.check_sequence(curriculum.sequence_length)
            stored = getattr(self.datamodule, "influence", None)
            check_influence(model.objective, stored and f"in '{stored}'")
            if stored:
                check_stored(model.objective, InfluenceStore(Path(stored).expanduser()).header["made_from"])

    @property
    def _is_dry_run(self) -> bool:
        """Whether nothing is logged or saved."""
        return bool(self._get(self.config, "trainer").fast_dev_run)

    def _save_config(self, checkpoint: Path | None, logger: Any) -> None:
        """Save the config in the folder of this command's logs, and set the run's id."""
        fits = self.subcommand == "fit"
        if checkpoint is not None and not fits:
            at_checkpoint_step(self.trainer, checkpoint)
        config = self.config[str(self.subcommand)]
        text = self._parser(self.subcommand).dump(config, skip_none=False)
        spans = resumed_spans(checkpoint, text) if fits else []
        if fits and isinstance(self.model, LongContextLM):
            self.model.spans = self.model.optimization.spans = spans
            self.model.config_text = describe_for_checkpoint(text)
        if not self.trainer.is_global_zero or self._is_dry_run:
            return
        if fits:
            for line in spans[-1].describe():
                rank_zero_info(line)
            named = checkpoint is not None and str(checkpoint) == self._requested_checkpoint
            self.training_run.record(checkpoint, text, config.seed_everything, spans=spans, named=named)
            self.model.run_id = self.training_run.id
            self.identity.config = text
        else:
            place_evaluation(self.trainer, str(self.subcommand), checkpoint, text, numbered=is_numbered(logger))

    def fit(self, **arguments: Any) -> None:
        """Train; after SIGTERM or Ctrl-C, print how to resume."""
        if self.trainer.is_global_zero and isinstance(self.model, LongContextLM):
            self.model.costs.peak_seconds_per_token = plan_utilization(self.model, self.config["fit"], self.trainer)
        if self.trainer.is_global_zero:
            keep_metrics(self.trainer.loggers)
        try:
            with logging_redirect_tqdm():  # starts a new line for messages next to a progress line
                self.trainer.fit(**arguments)
        except SystemExit as stopped:  # status 0 after SIGTERM, 1 after Ctrl-C
            if isinstance(stopped, SIGTERMException) or isinstance(stopped.__context__, KeyboardInterrupt):
                log_resume_command(self.trainer)
            if isinstance(stopped, SIGTERMException) and self.trainer.is_global_zero:
                self.preemption.requeue(would_resume=would_resume(self._requested_checkpoint, self.trainer))
            raise


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if value:
        return [value]
    return []
