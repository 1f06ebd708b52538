"""The whole config of a run, saved where its logs are."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override


class SavedConfig(SaveConfigCallback):
    """Saves ``config.yaml`` into the folder of the run's logs, or into ``default_root_dir`` without any.

    Nothing is saved where that is the working folder: a ``config.yaml`` there is the user's own, whom it would cost the
    file that the run was started with.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # of the first process
        if folder is not None and Path(folder).resolve() != Path.cwd():
            super().setup(trainer, pl_module, stage)
