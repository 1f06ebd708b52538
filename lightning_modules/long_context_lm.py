"""The LightningModule: a causal LM, an objective, and nothing that judges it."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from typing_extensions import override

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortContext, long_cross_entropy
from lightning_modules.metrics import LongPerplexity
from lightning_modules.models.adapters import changes_base, frozen_fingerprint
from lightning_modules.models.checks import check_scoring
from lightning_modules.models.config import DType, ModelConfig
from lightning_modules.models.loading import has_weights
from lightning_modules.models.optimizations import ShortDType, short_precision
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.objectives import LongCE, Objective
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.scoring.document_scorer import DocumentScorer, Failed, scoring_settings
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training import preflight
from lightning_modules.training.checkpoint_contents import add_contents, check_contents
from lightning_modules.training.export.facts import TrainingFacts, loading_facts, objective_facts, run_facts
from lightning_modules.training.fsdp import load_trainer_backbone
from lightning_modules.training.optimizers import default_lr_scheduler, default_optimizer
from lightning_modules.training.sequence_parallel import SequenceGroup, sequence_group
from lightning_modules.training.step_statistics import TrainingStatistics

REFERENCE_TOKENS = 2**15
"""Divisor of a batch's loss: any number gives the same step, if it is the same in all batches and processes. About the
tokens of a sequence keeps float16 gradients in range; a power of 2 rounds nothing."""


class LongContextLM(LightningModule):
    """Fine-tunes a Hugging Face causal LM on packed sequences, logs its perplexity and scores documents with it.

    The defaults are those of the paper (Appendix A.2 of Fang et al., 2025, https://arxiv.org/abs/2410.23771).

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights; a ``config.json`` file, or null with a
            `model_config` that names a ``model_type``, for random weights.
        objective: Weights of the tokens in the loss.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        short_dtype: Type of the short pass: ``bfloat16``, or by default that of the long one.
        short_window_share: Share of the short windows that is computed, drawn at random for each batch. The influence
            of their tokens is scaled up so that weights are right on average (and may be below 0).
        dtype: Type of the weights: float32 for training in mixed precision, ``auto`` for the stored one.
        head_kernel: Deprecated, without effect.
        ladder: Also score documents in several context lengths in prediction: ``{contexts: [4096, 8192, 16384]}``.
        optimizer: Takes the trainable parameters.
        lr_scheduler: Takes the optimizer and steps once per optimizer step; the default warms up over 20 steps.
        loading: The other fields of `lightning_modules.models.config.ModelConfig`, such as `lora`.
    """

    token_observer: Callable[[Tensor, Tensor, ShortContext | None, Tensor], None] | None = None
    """Called with the ``[B, T]`` log-likelihoods, weights, short context and labels of each batch, for a callback."""

    run_id: str | None = None
    """Id of the run that trains the model; its checkpoints carry it."""

    def __init__(
        self,
        pretrained_model_name_or_path: str | None = None,
        objective: Objective = LongCE(),  # noqa: B008, it holds one number and is never changed
        context_length: PositiveInt = 4096,
        stride: PositiveInt = 1024,
        short_dtype: ShortDType | None = None,
        short_window_share: float = 1.0,
        dtype: DType = "float32",
        head_kernel: str | None = None,
        ladder: ContextLadder | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable = default_lr_scheduler,
        **loading: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["objective", "ladder", "optimizer", "lr_scheduler", "head_kernel"])
        self.objective = objective
        self.context_length, self.stride = context_length, stride
        self.ladder = ladder
        self.short_dtype: ShortDType | None = short_dtype
        self.short_window_share = short_window_share
        preflight.check_settings(self, head_kernel)
        self.loading = ModelConfig(pretrained_model_name_or_path, dtype=dtype, **loading)
        # Checkpoints leave out stored weights that adapters do not change; a fingerprint identifies them.
        lora, stored = self.loading.lora, has_weights(pretrained_model_name_or_path)
        self._adapters_only = lora is not None and not changes_base(lora) and stored
        self._fingerprint: str | None = None
        self.strict_loading = not self._adapters_only
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._statistics = TrainingStatistics(objective, drawn=objective.uses_short_context and short_window_share < 1)
        self._perplexity = LongPerplexity()
        self._evaluated_at: int | None = None

    # ------------------------------------------------------------------------------------------------------ training

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        preflight.check_batch(self, batch, self._sequence_group)
        objective = self.objective.at_step(self.global_step)
        # The short pass first, so that its buffers never meet the activations that the long pass keeps.
        short = self.short_context(batch, batch_idx) if objective.uses_short_context else None
        long = self.log_likelihood(batch)
        token_weights = objective(long.detach(), short, batch)
        loss = long_cross_entropy(long, token_weights, batch["labels"], divisor=REFERENCE_TOKENS)
        preflight.check_finite(loss, self, batch_idx)
        total = loss.detach() * REFERENCE_TOKENS
        self._statistics.update(total, long.detach(), token_weights, batch["labels"], cap=objective.largest_weight)
        if self.token_observer is not None:
            self.token_observer(long.detach(), token_weights, short, batch["labels"])
        return loss

    def log_likelihood(self, batch: PackedBatch) -> Tensor:
        """Return ``[B, T]`` log-likelihoods of a batch given everything before each token, with gradient."""
        group = self._sequence_group
        return self.backbone(batch) if group is None else group.shared_log_likelihood(self.backbone, batch)

    def short_context(self, batch: PackedBatch, batch_idx: int) -> ShortContext:
        """Score a batch in short contexts, without gradient."""
        # Counted over all epochs, so that a resumed run continues. Processes that share sequences draw together.
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx if self._trainer else batch_idx
        seed = zlib.crc32(f"{torch.initial_seed()} {batches} {self.global_rank}".encode())
        group = self._sequence_group
        with short_precision(self.device, self.short_dtype):
            return short_log_likelihood(
                self.backbone,
                batch,
                context_length=self.context_length,
                stride=self.stride,
                window_fraction=self.short_window_share,
                seed=seed if group is None else group.agreed(seed),
                shared_by=None if group is None else group.processes,
            )

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Normalize the gradients once per optimizer step, and log means over all its tokens.

        The gradients are those of a sum over its tokens. A mean of the batches' means would count the tokens of a batch
        with few of them (padding, prompts, the end of an epoch) for more than others.
        """
        values = self._statistics.compute(self.trainer.strategy)
        # Lightning has divided the loss by the batches of a step, the strategy the gradients by the processes.
        divided_by = REFERENCE_TOKENS * self.trainer.accumulate_grad_batches * self.trainer.world_size
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._statistics.step_divisor / divided_by)
        self._statistics.reset()
        self.log_dict({f"train/{name}": value for name, value in values.items()}, batch_size=1)
        self.log("loss", values["loss"], prog_bar=True, logger=False, batch_size=1)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self._make_optimizer(trainable)
        scheduler = self._make_lr_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_fit_start(self) -> None:
        preflight.check_fit(self, self.trainer.datamodule)  # type: ignore[attr-defined]
        # Hugging Face models arrive in eval mode and Lightning keeps it: dropout and checkpointing would be off.
        self.backbone.train()
        self.on_validation_start()  # the model scores as well

    @override
    def on_fit_end(self) -> None:
        if self.trainer.num_training_batches == 0:
            raise ValueError("There is nothing to train on: the training set has no batch. Check `data` and its paths.")

    @override
    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        if not self.backbone.training:
            raise RuntimeError("The model is in eval mode, so dropout and gradient checkpointing are off.")
        self._statistics.start_clock()

    def stop_clock(self) -> None:
        """Do not count the time until the next batch as training time."""
        self._statistics.stop_clock()

    # ---------------------------------------------------------------------------------------------------- evaluation

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return ``[B, T]`` log-likelihoods under ``"log_likelihood"``, for the callbacks that evaluate the model."""
        self.backbone.check_token_ids(batch)
        group = self._sequence_group
        log_likelihood = self.backbone(batch) if group is None else group.log_likelihood(self.backbone, batch)
        self._perplexity.update(log_likelihood, batch["labels"].ne(IGNORE_INDEX))
        return {"log_likelihood": log_likelihood}

    @override
    def predict_step(self, batch: PackedBatch, batch_idx: int) -> Sequence[TokenScores | Failed]:
        """Return long and short log-likelihoods of each document. A document of a corpus may fail by itself."""
        self.backbone.check_token_ids(batch)
        scorer = self.document_scorer()
        return scorer.try_to_score(batch) if "document_refs" in batch else scorer.score(batch)

    def document_scorer(self) -> DocumentScorer:
        """Return the scorer of documents, once the model is there."""
        sizes = (self.context_length, self.stride)
        rungs = None if self.ladder is None else self.ladder.model_rungs(self.backbone, *sizes)
        return DocumentScorer(self.backbone, str(self.loading.pretrained_model_name_or_path), *sizes, rungs)

    def scoring_settings(self) -> dict[str, Any]:
        """Return everything except its tokens that a document's scores depend on, before the model is loaded."""
        return scoring_settings(self.loading, self.context_length, self.stride, self.ladder)

    @override
    def on_validation_start(self) -> None:
        self.backbone.check_rotary_dtype()
        with self.trainer.precision_plugin.forward_context():  # flash attention takes no float32
            check_scoring(self.backbone)
            if self._sequence_group is not None:
                self._sequence_group.check(self.backbone)

    @override
    def on_validation_epoch_start(self) -> None:
        self._perplexity.reset()
        self._statistics.stop_clock()

    @override
    def on_validation_epoch_end(self) -> None:
        self._evaluated_at = self.global_step
        self.log("val/perplexity", self._perplexity.compute().float(), prog_bar=True, sync_dist=True)

    @override
    def on_test_epoch_end(self) -> None:
        self.log("test/perplexity", self._perplexity.compute().float(), sync_dist=True)

    test_step = validation_step
    on_test_start = on_predict_start = on_validation_start
    on_test_epoch_start = on_validation_epoch_start

    @override
    def configure_model(self) -> None:
        if "backbone" not in self._modules:
            if (group := self._sequence_group) is not None:
                preflight.check_early(self, None, group.size)
                # In the place of `auto`, which may be another.
                self.loading = replace(self.loading, attn_implementation="sdpa")
            self.backbone = load_trainer_backbone(self._trainer, self.loading)
            if self._trainer:
                self.to(self.trainer.strategy.root_device)  # metrics, and the module's own device
            # Now: `precision: bf16-true` rounds the weights only after a checkpoint is read.
            self._fingerprint = frozen_fingerprint(self) if self._adapters_only else None

    @property
    def _sequence_group(self) -> SequenceGroup | None:
        return sequence_group(self.trainer.strategy) if self._trainer else None

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        add_contents(checkpoint, self, self.training_facts(), self._fingerprint)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_contents(checkpoint, self, self._fingerprint)

    def training_facts(self) -> TrainingFacts:
        """Return what is known of the run so far, for checkpoints and for the card of an exported model."""
        return TrainingFacts(
            **loading_facts(self.loading, self.backbone.base_model.config),
            **objective_facts(self.objective, self.context_length, self.stride),
            **run_facts(self.trainer, self._evaluated_at),
        )
