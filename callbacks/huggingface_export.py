"""Export the trained model to a folder that transformers loads."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from callbacks.requirements import require_long_context_lm
from lightning_modules.export.model import check_export, check_replaceable, export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.export.upload import check_upload, upload_export
from lightning_modules.models.tokenization.tokenizer import load_tokenizer


class HuggingFaceExport(Callback):
    """Saves model, tokenizer and a model card when training ends, for ``from_pretrained`` and ``longce score``.

    With ``push_to_hub``, the first process uploads the folder. If that fails, a warning has the command
    that repeats it.

    Args:
        output_dir: Folder to write. An earlier export there is replaced once the new one is complete; a folder with
            other files is refused.
        options: Fields of `lightning_modules.export.options.ExportOptions`.
    """

    def __init__(self, output_dir: str, **options: Any) -> None:
        self.output_dir = Path(output_dir).expanduser()
        self.options = ExportOptions(**options)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        check_replaceable(self.output_dir)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module = require_long_context_lm(pl_module, self)
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError(
                f"HuggingFaceExport needs all weights in one process, but {type(trainer.strategy).__name__} shards"
                " them: remove the callback, and run `longce export` on the last checkpoint."
            )
        check_upload(self.options)
        check_export(pl_module.backbone.model, self.output_dir, self.options, pl_module.training_facts())
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._tokenizer = getattr(data, "tokenizer", None)
        name = getattr(data, "tokenizer_name", None)
        revision = getattr(data, "tokenizer_revision", None)
        if self._tokenizer is not None and self._tokenizer.name_or_path and name is not None:
            self._tokenizer = load_tokenizer(name, revision=revision, trimmed_offsets=True)  # unmodified, as stored

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module = require_long_context_lm(pl_module, self)
        if trainer.is_global_zero and trainer.global_step > 0:
            export_model(
                pl_module.backbone.model,
                self._tokenizer,
                self.output_dir,
                options=self.options,
                facts=pl_module.training_facts(),
            )
        trainer.strategy.barrier()  # the folder exists for all processes from now on
        if trainer.is_global_zero and trainer.global_step > 0:
            try:
                upload_export(self.output_dir, self.options)
            except ValueError as error:
                rank_zero_warn(str(error))
