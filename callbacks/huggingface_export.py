"""The trained model as a folder that Hugging Face loads."""

import os
import shutil
import tempfile
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from peft import PeftModel
from typing_extensions import override

from lightning_modules.backbone import Backbone


class HuggingFaceExport(Callback):
    """Saves model and tokenizer when training ends, adapters merged, for ``from_pretrained`` and ``longce score``.

    Args:
        output_dir: Folder to write. An earlier export there is replaced once the new one is complete; a folder of
            anything else is refused.

    Raises:
        ValueError: If the folder holds something other than an export.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = Path(output_dir).expanduser()
        self._check_replaceable()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.global_step == 0:
            return
        backbone = pl_module.backbone
        assert isinstance(backbone, Backbone)
        model = backbone.model.merge_and_unload() if isinstance(backbone.model, PeftModel) else backbone.model
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.output_dir.parent, prefix=f".{self.output_dir.name}."))
        try:
            model.save_pretrained(temporary / "new")
            if (tokenizer := getattr(trainer.datamodule, "tokenizer", None)) is not None:  # type: ignore[attr-defined]
                tokenizer.save_pretrained(temporary / "new")
            self._check_replaceable()
            if self.output_dir.exists():
                os.rename(self.output_dir, temporary / "old")
            os.rename(temporary / "new", self.output_dir)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _check_replaceable(self) -> None:
        folder = self.output_dir
        is_export = (
            folder.is_dir() and (folder / "config.json").is_file() and not any(map(Path.is_dir, folder.iterdir()))
        )
        if folder.exists() and not is_export and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"`output_dir` of the export, '{folder}', exists and is no earlier export, which would be replaced:"
                " name a new folder."
            )
