"""The trained model as a folder that Hugging Face loads."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.training.export import ExportOptions, check_export, export_model
from lightning_modules.training.export.facts import Adapters, ExportDType
from lightning_modules.training.export.model import check_replaceable


class HuggingFaceExport(Callback):
    """Saves model, tokenizer and a model card when training ends, for ``from_pretrained`` and ``longce score``.

    Args:
        output_dir: Folder to write. An earlier export there is replaced once the new one is complete; a folder of
            anything else is refused.
        adapters: ``merged`` into the weights, or ``kept`` apart, with the base model's config in ``base/``.
        dtype: Of the weights of a whole model: ``auto`` is that of `model.dtype`, to which merged adapters are rounded;
            ``float32`` rounds nothing, ``bfloat16`` halves the files.
        legacy_rope_keys: Write ``rope_theta`` and ``rope_scaling`` for transformers 4 beside ``rope_parameters``;
            refused where they would not make it right.
        eabf_as_abf: Export a model trained with EABF as plain ABF, which every reader computes: logits then differ
            beyond the original length.

    Raises:
        ValueError: If the folder holds something other than an export, or, before training, if the model does not
            allow what is asked for.
    """

    def __init__(
        self,
        output_dir: str,
        adapters: Adapters = "merged",
        dtype: ExportDType = "auto",
        legacy_rope_keys: bool = False,
        eabf_as_abf: bool = False,
    ) -> None:
        self.output_dir = Path(output_dir).expanduser()
        self.options = ExportOptions(adapters, dtype, legacy_rope_keys, eabf_as_abf)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        check_replaceable(self.output_dir)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongContextLM)
        if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError(
                f"HuggingFaceExport needs all weights in one process; {type(trainer.strategy).__name__} shards them:"
                " remove the callback, and run `longce export` on the last checkpoint."
            )
        check_export(pl_module.backbone.model, self.output_dir, self.options, pl_module.training_facts())
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._tokenizer = getattr(data, "tokenizer", None)
        name, revision = getattr(data, "tokenizer_name", None), getattr(data, "tokenizer_revision", None)
        if self._tokenizer is not None and self._tokenizer.name_or_path and name is not None:
            self._tokenizer = load_tokenizer(name, revision=revision, trimmed_offsets=True)  # as it is stored

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LongContextLM)
        if trainer.is_global_zero and trainer.global_step > 0:
            export_model(
                pl_module.backbone.model,
                self._tokenizer,
                self.output_dir,
                options=self.options,
                facts=pl_module.training_facts(),
            )
        trainer.strategy.barrier()  # so that other processes find it
