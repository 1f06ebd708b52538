"""The LightningModule: a causal LM and its training objective. Evaluators are callbacks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import ShortScores, long_cross_entropy
from lightning_modules.metrics import LongPerplexity
from lightning_modules.models.loading.adapters import changes_base, frozen_fingerprint
from lightning_modules.models.loading.checks import check_attention_window
from lightning_modules.models.loading.config import DType, ModelConfig
from lightning_modules.models.loading.load import has_weights
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.sequence_group import SequenceGroup
from lightning_modules.models.short_context import ShortContextConfig, ShortMethod
from lightning_modules.objectives import CrossEntropy, LongCE, Objective, unwrap
from lightning_modules.scoring.document_scorer import DocumentScorer
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training import checkpoint_contents, evaluation, preflight, step
from lightning_modules.training.checkpoints.spans import Span
from lightning_modules.training.facts import TrainingFacts, loading_facts, objective_facts, run_facts
from lightning_modules.training.fsdp import load_trainer_backbone, saves_shards
from lightning_modules.training.monitoring.costs import StepCosts
from lightning_modules.training.optimizers import Optimization, ParameterGroups, default_lr_scheduler, default_optimizer
from lightning_modules.training.sequence_parallel import sequence_group

_OBJECTS = ("objective", "optimizer", "lr_scheduler", "parameter_groups")  # no hyperparameters


class LongContextLM(LightningModule):
    """A Hugging Face causal LM that is fine-tuned on packed sequences and scores documents.

    The defaults are those of the paper (Appendix A.2 of Fang et al., 2025, https://arxiv.org/abs/2410.23771).

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights. For random weights, a ``config.json``
            file, or null and a `model_config` with a ``model_type``.
        objective: Token weights of the loss.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        short_method: ``windows`` for the paper's short windows; ``sliding_window`` approximates them in training by
            one pass whose attention is limited to K tokens (`sliding_window_log_likelihood`).
        dtype: Dtype of the parameters: float32 for training in mixed precision, ``auto`` for the stored dtype.
        optimizer: Called with the trainable parameters.
        lr_scheduler: Called with the optimizer, and stepped with it; the default warms up over 20 steps.
        parameter_groups: Other learning rates for some parameters, and weight decay for weights only.
        loading: The other fields of `lightning_modules.models.loading.config.ModelConfig`, such as `lora`.
    """

    # The command line sets these; checkpoints keep them.
    run_id: str | None = None  # of the run that trains the model
    spans: Sequence[Span] = ()  # parts of the training between resumes; the last one is that of this process
    config_text: str = ""  # config of the training (YAML)

    def __init__(
        self,
        pretrained_model_name_or_path: str | None = None,
        objective: Objective = LongCE(),  # noqa: B008, it is never changed
        context_length: int = 4096,
        stride: int = 1024,
        short_method: ShortMethod = "windows",
        dtype: DType = "float32",
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable = default_lr_scheduler,
        parameter_groups: ParameterGroups | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=[*_OBJECTS, "server"])
        self.objective = objective
        self.short_context = ShortContextConfig(context_length, stride, short_method)
        self.loading = ModelConfig(pretrained_model_name_or_path, dtype=dtype, **loading)
        # Checkpoints of adapters do not contain the frozen base weights; a fingerprint identifies those.
        lora = self.loading.lora
        stored = has_weights(pretrained_model_name_or_path)
        self._adapters_only = lora is not None and not changes_base(lora) and stored
        self._frozen_fingerprint: str | None = None
        self.strict_loading = not self._adapters_only
        self.optimization = Optimization(optimizer, lr_scheduler, parameter_groups)
        self.sequence_group: SequenceGroup | None = None  # processes that share sequences, set with the weights
        self._statistics = step.TrainingStatistics(objective)
        self.costs = StepCosts()
        self._perplexities: dict[str, LongPerplexity] = {}  # by the name of the validation set
        # Callbacks add functions that take log-likelihoods, weights, short scores and batch of each training step.
        self.token_observers: list[Callable[[Tensor, Tensor, ShortScores | None, PackedBatch], None]] = []
        self._losses: dict[int, Tensor] = {}  # of the batches of an optimizer step
        self._evaluated_at: int | None = None

    # ------------------------------------------------------------------------------------------------------ training

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        objective = self.objective.at_step(self.global_step)
        # 1. Score the tokens in their short contexts, without gradient. This comes first, so that its buffers are free
        #    again before the long pass allocates activations.
        short = None
        if objective.uses_short_context:
            short = self.short_context.score(self.backbone, batch, self.sequence_group)
        full = self.full_log_likelihood(batch, objective)  # None, except with shifted sparse attention
        # 2. Score the whole documents, with gradient.
        long = self.log_likelihood(batch)
        scores = long.detach() if full is None else full
        # 3. Weight each token by the effect of the long context (Equation 7).
        token_weights = objective(scores, short, batch)
        # 4. Sum the weighted losses (Equation 6). `on_before_optimizer_step` turns the sum into a mean.
        loss = long_cross_entropy(long, token_weights, batch["labels"], divisor=step.REFERENCE_TOKENS)
        # 5. Keep sums for the log, and let callbacks see the tokens.
        self._losses[batch_idx] = loss.detach()
        cap = objective.largest_weight
        self._statistics.update(loss.detach(), long.detach(), token_weights, batch["scored"], cap=cap, short=short)
        for observe in self.token_observers:
            observe(scores, token_weights, short, batch)
        return loss

    def log_likelihood(self, batch: PackedBatch) -> Tensor:
        """Compute ``[B, T]`` log-likelihoods given the whole preceding document, with gradient."""
        if self.sequence_group is None:
            return self.backbone(batch, group=self.loading.shifted_sparse_attention)
        return self.sequence_group.sharded_log_likelihood(self.backbone, batch)

    @torch.no_grad()
    def full_log_likelihood(self, batch: PackedBatch, objective: Objective) -> Tensor | None:
        """Compute the ``[B, T]`` log-likelihoods by full attention that the weights of shifted sparse attention need.

        Weights compare contexts or models, not kinds of attention: a sparse one would hide the long context. The pass
        is in eval mode, as that of short contexts; None where the weights are known without it.
        """
        known = type(unwrap(objective)) is CrossEntropy or objective.uses_stored == "weights"
        if self.loading.shifted_sparse_attention is None or known:
            return None
        with eval_mode(self.backbone):
            return self.backbone(batch)

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the gradients of a sum over tokens into those of a mean, once per optimizer step, and log means.

        A mean of batch means would give more weight to the tokens of a batch that has few of them (padding, prompts,
        the end of an epoch).
        """
        # 1. Sum up the tokens and losses of all batches and processes of the step, and start over.
        copies = 1 if self.sequence_group is None else self.sequence_group.size
        norm = step.gradient_norm(self.parameters())
        values = self._statistics.compute(self.trainer.strategy, norm, copies=copies)
        values |= self.costs.end_step(float(values.pop("step_tokens")), self.trainer.world_size)
        losses = self._losses
        self._losses = {}
        # 2. Refuse the step if weights or a loss are not valid: after 1, so that no process waits for one that has
        #    stopped. The CPU waits for the accelerator in 1, and nowhere else in this hook.
        if self._statistics.invalid_weights or not torch.isfinite(values["loss"]):
            self._statistics.check_weights(self.global_step)
            preflight.raise_not_finite(losses, self)
        # 3. Turn the gradients into those of the mean over the tokens of the step, and their norm with them.
        batches = self.trainer.accumulate_grad_batches * self.trainer.world_size
        divisor = float(self._statistics.step_divisor)
        scale = step.normalize_gradients(self.parameters(), divisor, batches=batches)
        values["gradient_norm"] /= scale
        # 4. Log the means and costs.
        self.log_dict({f"train/{name}": value for name, value in values.items()}, batch_size=1)
        self.log("loss", values["loss"], prog_bar=True, logger=False, batch_size=1)

    @override
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        # Lightning would keep the gradients, as large as the weights, during the passes over the next batch.
        optimizer.zero_grad()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return self.optimization.configure(self)

    @override
    def configure_callbacks(self) -> list[Callback]:
        preflight.check_callbacks(self.trainer.callbacks)  # type: ignore[attr-defined]
        return [self.optimization, self.costs]

    @override
    def on_fit_start(self) -> None:
        # Hugging Face models arrive in eval mode and Lightning keeps it: dropout and checkpointing would be off.
        self.backbone.train()
        # An earlier run may have been interrupted within a step, and have had other weights at the same step.
        self._losses = {}
        self._statistics.reset()
        self.on_validation_start()  # training needs the same scoring checks
        # After them, because they may have chosen another attention.
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        preflight.check_fit(self.objective, self.loading, self.backbone, data)
        preflight.warn_of_noise(self.objective, self.backbone, self.trainer)
        if self.objective.uses_short_context and self.short_context.method == "sliding_window":
            with self.trainer.precision_plugin.forward_context():
                check_attention_window(self.backbone)
        if self.loading.shifted_sparse_attention is not None:
            with self.trainer.precision_plugin.forward_context():
                check_attention_window(self.backbone, groups=True)

    @override
    def on_fit_end(self) -> None:
        if self.trainer.num_training_batches == 0:
            raise ValueError("There is nothing to train on: the training set is empty. Check `data` and its paths.")

    @override
    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        step.check_training_batch(batch, self.backbone, self.objective, self.short_context)
        if self.sequence_group is not None:
            self.sequence_group.check_same_batch(batch)

    # ---------------------------------------------------------------------------------------------------- evaluation

    @override
    def validation_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        """Return ``[B, T]`` log-likelihoods under ``"log_likelihood"``, for the callbacks that evaluate the model."""
        step.admit_batch(batch, self.backbone)
        if self.sequence_group is None:
            log_likelihood = self.backbone(batch)
        else:
            log_likelihood = self.sequence_group.log_likelihood(self.backbone, batch)
        evaluation.update_perplexities(self._perplexities, batch, log_likelihood)
        return {"log_likelihood": log_likelihood}

    @override
    def predict_step(self, batch: PackedBatch, batch_idx: int) -> Sequence[TokenScores]:
        """Return the long and short log-likelihoods of each document."""
        step.admit_batch(batch, self.backbone)
        name = str(self.loading.pretrained_model_name_or_path)
        return DocumentScorer(self.backbone, name, self.short_context).score(batch)

    @override
    def on_validation_start(self) -> None:
        preflight.check_loaded(self.backbone, self.trainer, self.sequence_group)

    @override
    def on_validation_epoch_start(self) -> None:
        self._perplexities = evaluation.new_perplexities(self)

    @override
    def on_validation_epoch_end(self) -> None:
        self._evaluated_at = self.global_step
        evaluation.log_perplexities(self, self._perplexities, "val")

    @override
    def on_test_epoch_end(self) -> None:
        evaluation.log_perplexities(self, self._perplexities, "test")

    test_step = validation_step
    on_test_start = on_predict_start = on_validation_start
    on_test_epoch_start = on_validation_epoch_start

    def check_early(
        self, sequence_length: int | None, sequence_parallel_size: int = 1, skips_to: int | None = None
    ) -> None:
        """Check all settings before text is tokenized or weights are loaded; see `preflight.check_early`."""
        settings = (self.objective, self.short_context, self.loading)
        preflight.check_early(*settings, sequence_length, sequence_parallel_size, skips_to)

    @override
    def configure_model(self) -> None:
        self.sequence_group = sequence_group(self.trainer.strategy) if self._trainer else None
        if "backbone" not in self._modules:
            if self.sequence_group is not None:
                self.check_early(None, self.sequence_group.size)
                # `auto` may choose another implementation.
                self.loading = replace(self.loading, attn_implementation="sdpa")
            self.backbone = load_trainer_backbone(self._trainer, self.loading)
            if self._trainer:
                self.to(self.trainer.strategy.root_device)  # moves the metrics and sets `self.device`
            # Computed now, because a checkpoint is loaded before `precision: bf16-true` rounds the weights.
            self._frozen_fingerprint = frozen_fingerprint(self) if self._adapters_only else None

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        data = getattr(self.trainer, "datamodule", None)
        checkpoint |= checkpoint_contents.run_contents(self.run_id, self.costs.totals, self.config_text, self.spans)
        checkpoint |= checkpoint_contents.export_contents(self.backbone.base_model, self.training_facts(), data)
        if self._frozen_fingerprint is not None:
            sharded = saves_shards(self.trainer.strategy)
            checkpoint_contents.leave_out_frozen_weights(checkpoint, self, self._frozen_fingerprint, sharded=sharded)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint_contents.check_contents(
            checkpoint,
            self,
            self.backbone.base_model,
            self.loading,
            fingerprint=self._frozen_fingerprint,
            resumes=self._trainer is not None and self.trainer.state.fn == "fit",
        )
        self.costs.totals |= checkpoint.get(checkpoint_contents.COSTS_KEY, {})

    def training_facts(self) -> TrainingFacts:
        """Return facts about the run so far, for checkpoints and the card of an exported model."""
        return TrainingFacts(
            **loading_facts(self.loading, self.backbone.base_model.config),
            **objective_facts(self.objective, self.short_context),
            **run_facts(self.trainer, self._evaluated_at),
            resumes=[{"step": span.step, "changed": span.changed} for span in self.spans if span.changed],
        )
