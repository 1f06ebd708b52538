"""What a language model does in validation, test and prediction, and what is checked before."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.metrics import LongPerplexity
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.identity import model_identity
from lightning_modules.models.loading import has_weights
from lightning_modules.models.probe import check_scoring
from lightning_modules.scoring.context_lengths import ContextLadder, Rungs
from lightning_modules.scoring.document_scorer import DocumentScorer, Failed
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training.sequence_parallel import SequenceGroup, sequence_group
from lightning_modules.utilities.identity import content_hash


class EvaluationSteps(LightningModule):
    """The steps of a module that scores documents with a backbone, which its subclass makes.

    It logs ``val/perplexity`` and ``test/perplexity`` over all scored tokens, and predicts `TokenScores`.
    """

    backbone: Backbone
    context_length: int
    stride: int
    ladder: ContextLadder | None = None
    _loading: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._perplexity = LongPerplexity()
        self._evaluated_at: int | None = None

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        """Log-likelihoods ``[B, T]`` under ``"log_likelihood"``, for the callbacks that judge the model."""
        self.backbone.check_token_ids(batch)
        group = self._sequence_group
        log_likelihood = self.backbone(batch) if group is None else group.log_likelihood(self.backbone, batch)
        self._perplexity.update(log_likelihood, batch["labels"].ne(IGNORE_INDEX))
        return {"log_likelihood": log_likelihood}

    @override
    def test_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        return self.validation_step(batch, batch_idx)

    @override
    def predict_step(self, batch: PackedBatch, batch_idx: int) -> Sequence[TokenScores | Failed]:
        """Long and short log-likelihoods of each document under this model itself.

        A document of a corpus may fail by itself, others stop the run.
        """
        self.backbone.check_token_ids(batch)
        scorer = DocumentScorer(
            self.backbone,
            name=str(self._loading["pretrained_model_name_or_path"]),
            context_length=self.context_length,
            stride=self.stride,
            rungs=self.rungs(),
        )
        return scorer.try_to_score(batch) if "origins" in batch else scorer.score(batch)

    def rungs(self) -> Rungs | None:
        """Those of the context ladder, if there is one; the model is there."""
        if self.ladder is None:
            return None
        config = self.backbone.base_model.config.get_text_config(decoder=True)
        longest = getattr(config, "max_position_embeddings", None)
        return self.ladder.rungs(context_length=self.context_length, stride=self.stride, longest=longest)

    def scoring_settings(self) -> dict[str, Any]:
        """All that a document's scores depend on besides its tokens, in plain values; the model is not needed yet."""
        path, trusted = self._loading["pretrained_model_name_or_path"], self._loading["trust_remote_code"]
        if has_weights(path):
            model: str | None = model_identity(path, self._loading["revision"], trust_remote_code=trusted)
        else:  # random weights, or those of a checkpoint; a config if there is a path
            model = None if path is None else f"sha256:{content_hash(Path(path).expanduser())}"
        names = ("model_config", "context_extension", "dtype", "lora", "quantization")
        return {
            "model": model,
            **{name: self._loading[name] for name in names},
            "context_length": int(self.context_length),
            "stride": int(self.stride),
            "ladder": None if self.ladder is None else asdict(self.ladder),
        }

    @override
    def on_validation_start(self) -> None:
        self._check_backbone()

    @override
    def on_test_start(self) -> None:
        self._check_backbone()

    @override
    def on_predict_start(self) -> None:
        self._check_backbone()

    @override
    def on_validation_epoch_start(self) -> None:
        self._perplexity.reset()

    @override
    def on_test_epoch_start(self) -> None:
        self._perplexity.reset()

    @override
    def on_validation_epoch_end(self) -> None:
        self._evaluated_at = self.global_step
        self.log("val/perplexity", self._perplexity.compute().float(), prog_bar=True, sync_dist=True)

    @override
    def on_test_epoch_end(self) -> None:
        self.log("test/perplexity", self._perplexity.compute().float(), sync_dist=True)

    def _check_backbone(self) -> None:
        self.backbone.check_rotary_dtype()
        with self.trainer.precision_plugin.forward_context():  # flash attention takes no float32
            check_scoring(self.backbone)
            if self._sequence_group is not None:
                self._sequence_group.check(self.backbone)

    @property
    def _sequence_group(self) -> SequenceGroup | None:
        return sequence_group(self.trainer.strategy) if self._trainer else None
