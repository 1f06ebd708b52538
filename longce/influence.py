"""``longce influence``: compute token weights, or reference losses, of all training sequences, on any devices."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig, is_served
from lightning_modules.models.loading.dtypes import scoring_config
from lightning_modules.models.loading.identity import check_same_model, model_identity
from lightning_modules.models.loading.load import check_model, load_backbone
from lightning_modules.models.progress import count_tokens, report_progress, show_progress
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.served.scorer import connect
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from lightning_modules.objectives import LongCE, Rho1, unwrap
from lightning_modules.scoring.config import InfluenceConfig, tokenizer_name
from lightning_modules.scoring.influence_transfer import compute_influence, compute_reference_losses, make_transfer
from lightning_modules.training.preflight import check_loaded
from lightning_modules.utilities.collectives import gathered, patient_group


class InfluenceScorer(LightningModule):
    """Evaluator that scores training sequences and passes a value of each token back to the data module.

    Args:
        loading: How the evaluator is loaded.
        compute: Returns ``[B, T]`` float32 values of a batch and the evaluator; NaN for impossible scores.
        short_context: K and d of `compute`, in the evaluator's tokens; None if it has no short pass.
        identity: Content hash of the evaluator.
    """

    def __init__(
        self,
        loading: ModelConfig,
        compute: Callable[[PackedBatch, Scorer], Tensor],
        short_context: ShortContext | None,
        identity: str,
    ) -> None:
        super().__init__()
        self._loading = loading
        self._compute = compute
        self._short_context = short_context
        self._identity = identity

    @override
    def configure_model(self) -> None:
        # If no sequence is left, no process loads the model. Otherwise all do, because DDP compares their weights.
        if "backbone" in self._modules or self._row_data.remaining == 0:
            return
        self.backbone: Scorer
        if is_served(self._loading.pretrained_model_name_or_path):
            self.backbone = connect(self._loading)
            return
        autocast = str(self.trainer.precision).endswith("-mixed")
        device = self.trainer.strategy.root_device
        backbone = load_backbone(self._loading, device=device, autocast=autocast)
        check_same_model(self._identity, self._loading)
        self.backbone = backbone.eval().requires_grad_(False)
        report_progress(backbone.decoder)

    @override
    def on_predict_start(self) -> None:
        check_loaded(self.backbone, self.trainer)

    @override
    def predict_step(self, batch: tuple[list[int], PackedBatch], batch_idx: int) -> Tensor:
        """Return ``[B, T]`` float32 values."""
        numbers, rows = batch
        count, length = rows["labels"].shape
        tokens = count * (length if self._short_context is None else count_tokens(length, self._short_context))
        with show_progress([rows], "sequences", [tokens]) as shown:
            (values,) = [self._compute(each, self.backbone) for each in shown]
        if not torch.isfinite(values).all():
            raise FloatingPointError(
                f"The evaluator's scores of sequence(s) {numbers} are not finite:"
                " its dtype overflows, or the model file is damaged. Choose another `--evaluator_dtype` or evaluator."
            )
        return values

    @override
    def on_predict_batch_end(
        self, outputs: Any, batch: tuple[list[int], PackedBatch], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._row_data.write(batch[0], outputs)

    @property
    def _row_data(self) -> Any:
        """The data module. Its class is in `datamodules`, which this package does not import."""
        return self.trainer.datamodule  # type: ignore[attr-defined]


class InfluenceTrainer(Trainer):
    """Trainer that can also run ``longce influence``."""

    def influence(self, model: LongContextLM, datamodule: LightningDataModule, evaluator: str, **options: Any) -> None:
        """Compute and store an evaluator's LongCE token weights, or its losses for Rho-1, of all training sequences.

        Takes the configs of ``longce fit``: sequences come from ``data``, context length, stride and gamma from
        ``model`` (whose weights are not loaded), devices and precision from ``trainer``. Evaluator and options are the
        fields of `InfluenceConfig`. Training then needs no short-context pass. A killed run resumes where it stopped.
        If the objective is Rho1, the losses of the evaluator are stored, which is then the reference model.
        """
        config = InfluenceConfig(evaluator, **options)
        gamma = self._check_settings(model, datamodule)
        short_context = None if gamma is None else model.short_context
        name = tokenizer_name(evaluator, config.evaluator_tokenizer, "`evaluator_tokenizer`")
        loading = config.loading()
        stored = check_model(loading)
        if stored is not None:  # like other scoring, float32 on a CPU slow in the stored type
            loading = scoring_config(loading, stored, self.strategy.root_device)
        revision = loading.revision if name == evaluator else None  # it is the evaluator's
        tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=loading.trust_remote_code)
        rows_tokenizer: PreTrainedTokenizerFast = datamodule.tokenizer  # type: ignore[attr-defined]
        transfer = make_transfer(rows_tokenizer, tokenizer, add_special_tokens=config.evaluator_add_special_tokens)
        compute: Callable[[PackedBatch, Scorer], Tensor] = compute_reference_losses
        if gamma is not None:
            weigh = compute_influence if transfer is None else transfer.compute_influence
            compute = partial(weigh, short_context=model.short_context, gamma=gamma)
        elif transfer is not None:
            raise ValueError(
                f"Rho1 compares losses of the same tokens, and '{name}' has another tokenizer than the training data:"
                " choose a reference model with the tokenizer of `data.tokenizer`."
            )
        made_from: dict[str, Any] = {
            "context_length": None if short_context is None else short_context.context_length,
            "stride": None if short_context is None else short_context.stride,
            "gamma": gamma,
            "evaluator": model_identity(loading),
            "evaluator_model_config": config.evaluator_model_config,
            "evaluator_tokenizer": None if transfer is None else tokenizer_hash(tokenizer),
            "evaluator_add_special_tokens": None if transfer is None else config.evaluator_add_special_tokens,
            "evaluator_dtype": loading.dtype,
            "evaluator_attn_implementation": config.evaluator_attn_implementation,
            "precision": str(self.precision),
        }
        scorer = InfluenceScorer(loading, compute, short_context, made_from["evaluator"])
        # If all values are there already, the data loader is empty; Lightning would warn about that.
        warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero")
        rows = datamodule.influence_rows(made_from, config.output)  # type: ignore[attr-defined]
        self.predict(scorer, datamodule=rows, return_predictions=False)
        gathered(None, patient_group())  # ranks may finish more than half an hour apart, beyond the default timeout
        if self.is_global_zero:
            sys.stdout.write(report(rows))

    def _check_settings(self, model: LongContextLM, datamodule: LightningDataModule) -> float | None:
        """Return the largest weight, or None for losses, after all checks that need no model or data."""
        objective = unwrap(model.objective) if isinstance(model, LongContextLM) else None
        if not isinstance(objective, (LongCE, Rho1)):
            raise ValueError(
                "`longce influence` needs a `LongContextLM` whose objective is LongCE, StoredInfluence or Rho1,"
                f" got {type(model if objective is None else objective).__name__}."
            )
        if not callable(getattr(datamodule, "influence_rows", None)):
            raise ValueError(
                f"`longce influence` needs packed training sequences, but {type(datamodule).__name__} lacks them."
            )
        length = getattr(datamodule, "sequence_length", None)
        if length is not None and isinstance(objective, LongCE):
            model.short_context.check_sequence(length)
        if not isinstance(self.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                "Each process scores its own sequences with a full copy of the evaluator, so `trainer.strategy` must be"
                f" 'auto' or 'ddp', got {type(self.strategy).__name__}."
            )
        return float(objective.gamma) if isinstance(objective, LongCE) else None


def report(rows: Any) -> str:
    """Summarize the stored values, and print the options to train with them."""
    writer = rows.writer
    folder = Path(rows.folder)
    made_from = rows.writer.made_from
    total = len(writer.rows)
    missing = len(writer.remaining())
    kind = "Reference losses" if made_from["gamma"] is None else "Token weights"
    if missing:
        return (
            f"{folder} has {kind.lower()} of {total - missing:,} of {total:,} sequences.\n"
            "Run the same command again to resume.\n"
        )
    values = writer.statistics()
    heading = (
        f"{kind} of {total:,} sequences of {made_from['sequence_length']:,} tokens in {folder}"
        f"{'' if rows.remaining else ' (already complete)'}\n"
    )
    if made_from["gamma"] is None:
        return (
            f"{heading}mean {values['loss_mean']:.4f} nats\n"
            f"Train with: --data.influence {folder} --model.objective Rho1\n"
        )
    return (
        f"{heading}mean {values['weight_mean']:.4f}, above 1: {values['weight_above_1']:.1%},"
        f" at the cap of {made_from['gamma']:g}: {values['weight_at_cap']:.1%}\n"
        f"Train with: --data.influence {folder} --model.objective StoredInfluence"
        f" --model.objective.gamma {made_from['gamma']:g}\n"
    )
