"""LightningCLI for the commands that take the configs of ``longce fit`` and more options."""

from collections.abc import Callable
from typing import Any

import jsonargparse
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_modules.commands.cli.experiment_options import accept_saved_config
from lightning_modules.commands.cli.lightning_cli import LongceCLI
from lightning_modules.commands.influence import InfluenceTrainer


class InfluenceCLI(LongceCLI):
    """LightningCLI of ``longce influence``: the configs of ``fit``, without logger, callbacks and checkpoints."""

    def __init__(self) -> None:
        super().__init__(trainer_class=InfluenceTrainer)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Accept the further keys of a config that ``longce fit`` saved."""
        super().add_arguments_to_parser(parser)
        accept_saved_config(parser)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(
            logger=False, callbacks=[], enable_checkpointing=False, use_distributed_sampler=False, **kwargs
        )

    @override
    def after_instantiate_classes(self) -> None:
        """Skip the checks of ``fit``: the trained model is not loaded, and the command checks the rest itself."""


class PartCLI(LongceCLI):
    """Parser for the options of ``longce fit`` plus those of another command; it runs nothing."""

    def __init__(self, add_options: Callable[[Any], None]) -> None:
        self._add_options = add_options
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        self._add_options(parser)

    @override
    def _set_seed(self) -> None:
        """Skip seeding: nothing here is random."""

    @override
    def instantiate_classes(self) -> None:
        """Instantiate nothing; `make` instantiates the model or the data module on demand."""

    def make(self, name: str) -> Any:
        """Instantiate only the ``model`` or only the ``data`` of the config."""
        part = jsonargparse.Namespace({name: self.config[name].clone()})
        # The settings of a model without a class are a group, which would be instantiated even if it is missing.
        return self.parser.instantiate(part, instantiate_groups=name == "model")[name]
