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
        output_dir: Folder to write; an earlier export in it is replaced in one step.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = Path(output_dir)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        backbone = pl_module.backbone
        assert isinstance(backbone, Backbone)
        model = backbone.model.merge_and_unload() if isinstance(backbone.model, PeftModel) else backbone.model
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.output_dir.parent, prefix=f".{self.output_dir.name}."))
        try:
            model.save_pretrained(temporary)
            if (tokenizer := getattr(trainer.datamodule, "tokenizer", None)) is not None:  # type: ignore[attr-defined]
                tokenizer.save_pretrained(temporary)
            os.chmod(temporary, 0o755)
            if self.output_dir.exists():
                shutil.rmtree(self.output_dir)
            os.rename(temporary, self.output_dir)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
