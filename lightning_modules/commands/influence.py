"""Run ``longce influence``: an evaluator goes once through the training rows, on any number of devices."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.windows import check_context
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_scoring
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.identity import check_same_model, model_identity
from lightning_modules.models.loading import load_backbone, load_config
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from lightning_modules.objectives import LongCE, StoredInfluence, unwrap
from lightning_modules.scoring.config import InfluenceConfig
from lightning_modules.scoring.influence_transfer import InfluenceTransfer, compute_influence, make_transfer
from lightning_modules.utilities.collectives import gathered, patient_group


class InfluenceScorer(LightningModule):
    """Runs an evaluator over numbered training rows and hands their weights to the data module that gave them.

    The settings are context length, stride and gamma; a transfer is for an evaluator with its own tokenizer.
    """

    def __init__(
        self, loading: ModelConfig, settings: dict[str, Any], transfer: InfluenceTransfer | None, identity: str
    ) -> None:
        super().__init__()
        self._loading, self._settings = loading, settings
        self._transfer, self._identity = transfer, identity

    @override
    def configure_model(self) -> None:
        # With no row left no process loads the model; otherwise all need it, as DDP compares weights.
        if "backbone" in self._modules or self._rows.remaining == 0:
            return
        autocast = str(self.trainer.precision).endswith("-mixed")
        device = self.trainer.strategy.root_device
        backbone = load_backbone(self._loading, device=device, autocast=autocast)
        check_same_model(self._identity, self._loading)
        self.backbone: Backbone = backbone.eval().requires_grad_(False)

    @override
    def on_predict_start(self) -> None:
        self.backbone.check_rotary_dtype()
        with self.trainer.precision_plugin.forward_context():
            check_scoring(self.backbone)

    @override
    def predict_step(self, batch: tuple[list[int], PackedBatch], batch_idx: int) -> Tensor:
        """Return ``[B, T]`` float32 weights of the rows."""
        numbers, rows = batch
        weigh = compute_influence if self._transfer is None else self._transfer.compute_influence
        influence = weigh(rows, self.backbone, **self._settings)
        if not torch.isfinite(influence).all():
            raise FloatingPointError(
                f"The evaluator gives weights that are not finite in row(s) {numbers}: {self.backbone.base_model.dtype}"
                " is too narrow for it, or its weights are damaged. Choose another `--evaluator_dtype` or evaluator."
            )
        return influence

    @override
    def on_predict_batch_end(
        self, outputs: Any, batch: tuple[list[int], PackedBatch], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._rows.write(batch[0], outputs)

    @property
    def _rows(self) -> Any:
        """The data module: a class of `datamodules`, which is not imported here."""
        return self.trainer.datamodule  # type: ignore[attr-defined]


class InfluenceTrainer(Trainer):
    """Trainer that can also run ``longce influence``."""

    def influence(self, model: LongContextLM, datamodule: LightningDataModule, evaluator: str, **options: Any) -> None:
        """Store LongCE weights of the training rows by an evaluator, so that training makes no short pass.

        Takes the configs of ``longce fit``: the rows are those of ``data``, context length, stride and gamma those of
        ``model`` (whose weights are not loaded), devices and precision those of ``trainer``. Evaluator and options are
        the fields of `InfluenceConfig`. A killed run resumes where it stopped.
        """
        config = InfluenceConfig(evaluator, **options)
        settings = self._check(model, datamodule)
        load_config(loading := config.loading())
        source: dict[str, Any] = {"revision": loading.revision, "trust_remote_code": loading.trust_remote_code}
        tokenizer = load_tokenizer(config.evaluator_tokenizer or evaluator, **source)
        rows_tokenizer: PreTrainedTokenizerFast = datamodule.tokenizer  # type: ignore[attr-defined]
        transfer = make_transfer(rows_tokenizer, tokenizer, add_special_tokens=config.evaluator_add_special_tokens)
        made_from = {
            **settings,
            "evaluator": model_identity(loading),
            "evaluator_model_config": config.evaluator_model_config,
            "evaluator_tokenizer": None if transfer is None else tokenizer_hash(tokenizer),
            "evaluator_add_special_tokens": None if transfer is None else config.evaluator_add_special_tokens,
            "evaluator_dtype": config.evaluator_dtype,
            "evaluator_attn_implementation": config.evaluator_attn_implementation,
            "precision": str(self.precision),
        }
        scorer = InfluenceScorer(loading, settings, transfer, made_from["evaluator"])
        # When the weights are complete already, nothing is left to do: do not warn.
        warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero")
        rows = datamodule.influence_rows(made_from, config.output)  # type: ignore[attr-defined]
        self.predict(scorer, datamodule=rows, return_predictions=False)
        gathered(None, patient_group())  # the shares of a long run may differ by more than half an hour
        if self.is_global_zero:
            rows.writer.finish()
            sys.stdout.write(report(rows))

    def _check(self, model: LongContextLM, datamodule: LightningDataModule) -> dict[str, Any]:
        """Return the settings of the weights, after the checks that need nothing to be loaded."""
        objective = unwrap(model.objective)
        if not isinstance(objective, (LongCE, StoredInfluence)):
            raise ValueError(
                f"`longce influence` computes the weights of LongCE, and `model.objective` is"
                f" {type(objective).__name__}: set it to LongCE or StoredInfluence."
            )
        if not callable(getattr(datamodule, "influence_rows", None)):
            raise ValueError(f"`data` has no packed training rows to weigh: {type(datamodule).__name__}.")
        check_context(model.context_length, model.stride, getattr(datamodule, "sequence_length", None))
        if not isinstance(self.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                f"Each process scores different rows and holds the whole evaluator, so that `trainer.strategy` must be"
                f" 'auto' or 'ddp', not {type(self.strategy).__name__}."
            )
        return {
            "context_length": int(model.context_length),
            "stride": int(model.stride),
            "gamma": float(objective.gamma),
        }


def report(rows: Any) -> str:
    """Describe what was done, and how to train with it, as text for a terminal."""
    writer, folder, header = rows.writer, Path(rows.folder), rows.writer.header
    made_from, total = header["made_from"], len(writer.rows)
    if not header["complete"]:
        missing = len(writer.remaining())
        return f"{total - missing:,} of {total:,} rows are weighed in {folder}\nRun the same command again to resume.\n"
    values = header["statistics"]
    return (
        f"Weights of {total:,} rows of {made_from['sequence_length']:,} tokens in {folder}"
        f"{'' if rows.remaining else ' (complete already)'}\n"
        f"mean {values['weight_mean']:.4f}, above 1: {values['weight_above_1']:.1%},"
        f" at the cap of {made_from['gamma']:g}: {values['weight_at_cap']:.1%}\n"
        f"Train with: --data.influence {folder} --model.objective StoredInfluence"
        f" --model.objective.gamma {made_from['gamma']:g}\n"
    )
