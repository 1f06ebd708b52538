"""The LightningModule: a causal LM, an objective, and nothing that judges it."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedConfig
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.evaluation_steps import EvaluationSteps
from lightning_modules.functional import ShortContext, Weighing
from lightning_modules.functional.head_kernels import HeadKernel, check_installed
from lightning_modules.functional.windows import check_context, check_window_share
from lightning_modules.models.adapters import (
    changes_base,
    frozen_fingerprint,
    quantization_config,
    same_frozen,
    trained_state,
)
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_weight_files
from lightning_modules.models.context_extension.rotary_checks import check_static
from lightning_modules.models.loading import DType, check_quantization, has_weights, load_backbone, load_config
from lightning_modules.models.optimizations.gradient_checkpointing import Checkpointing
from lightning_modules.models.optimizations.low_precision import ShortDType, check_short_dtype, short_precision
from lightning_modules.models.tokenization.tokenizer import warn_of_other_tokenizer
from lightning_modules.objectives import LongCE, Objective, check_cap, check_influence, check_normalised
from lightning_modules.scoring.context_lengths import ContextLadder
from lightning_modules.training.checkpoints.order import RUN_ID
from lightning_modules.training.export import (
    FINGERPRINT,
    KEY,
    TrainingFacts,
    check_resumable,
    check_same_model,
    check_same_weights,
    loaded_tokenizer,
    loading_facts,
    made_tokenizer,
    objective_facts,
    run_facts,
    stored,
)
from lightning_modules.training.fsdp import (
    divide_gradients,
    load_trainer_backbone,
    saves_parts,
)
from lightning_modules.training.sequence_parallel import check_sequence_parallelism
from lightning_modules.training.step_statistics import TrainingStatistics

# The paper's (Appendix A.2); as class and arguments, so that a saved config can hold them.
OPTIMIZER: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.0},
}
LR_SCHEDULER: dict[str, Any] = {
    "class_path": "torch.optim.lr_scheduler.LinearLR",
    "init_args": {"start_factor": 0.05, "total_iters": 19},
}

REFERENCE_TOKENS = 2**15
"""What a batch's loss is divided by in its backward pass: any number gives the same step, if it is the same in all
batches and processes. About the tokens of a row keep float16 gradients in range; a power of 2 rounds nothing."""

TRAINED = "trained_weights"
"""Where a checkpoint without the weights that adapters leave as they were names those that it has."""


class LongContextLM(EvaluationSteps):
    """Fine-tunes a Hugging Face causal LM on packed rows and scores documents with it.

    The defaults are those of the paper (Appendix A.2 of Fang et al., 2025, https://arxiv.org/abs/2410.23771).

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights; a ``config.json`` file, or null with a
            `model_config` that names a ``model_type``, for random weights.
        objective: How much each token counts in the loss.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        short_dtype: Compute the short pass in fewer bits than the long one: ``bfloat16``, or ``float8`` on GPUs that
            have it. By default as the long one.
        short_window_share: Share of the short windows that is computed, drawn at random for each batch. The influence
            of their tokens is scaled up so that weights are right on average (and may be below 0).
        model_config: Values that replace those of the model's config; dictionaries in it (``rope_parameters``) are
            merged key by key.
        context_extension: How the model's context is extended: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`.
        revision: Branch, tag or commit on the hub.
        dtype: Of the weights: float32 for training in mixed precision, ``auto`` for the stored one.
        attn_implementation: As in transformers; ``auto`` is ``flash_attention_2`` where it is installed and the model
            runs on a GPU in half precision, else torch's scaled dot product attention.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass; with ``selective`` all but
            the outputs of attention, which is faster and takes ``tokens * hidden size`` numbers per layer more.
        lora: Arguments of ``peft.LoraConfig``; the other weights are frozen. ``modules_to_save: embeddings-and-norms``
            trains those in full besides, as LongLoRA does.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: the frozen weights are held in 4 or 8 bits, as
            in QLoRA. Needs bitsandbytes.
        trust_remote_code: Run code from the model's repository; off unless you trust it.
        head_kernel: What computes the loss from hidden states in training: ``chunked``, our own, which is exact and
            fits every model, or ``torch`` (torch >= 2.13), ``liger`` (liger-kernel >= 0.8.5, GPU) or ``cce``
            (cut-cross-entropy, GPU in half precision), which are compared with exact gradients before training.
        ladder: In prediction, score documents on a context ladder, too: ``{contexts: [4096, 8192, 16384]}``.
        optimizer: Takes the trainable parameters.
        lr_scheduler: Takes the optimizer and steps once per optimizer step; the default warms up over 20 steps.

    Raises:
        ValueError: If ``context_length`` or ``stride`` is below 1, or ``short_window_share`` is not in (0, 1], or below
            1 for an objective that is normalised.
    """

    token_observer: Callable[[Tensor, Tensor, Weighing, Tensor], None] | None = None
    """Shown the ``[B, T]`` log-likelihoods, weights, weighing and labels of each batch, for a callback."""

    run_id: str | None = None
    """Of the run that trains the model; its checkpoints carry it."""

    def __init__(
        self,
        pretrained_model_name_or_path: str | None = None,
        objective: Objective = LongCE(),  # noqa: B008, it holds one number and is never changed
        context_length: PositiveInt = 4096,
        stride: PositiveInt = 1024,
        short_dtype: ShortDType | None = None,
        short_window_share: float = 1.0,
        model_config: dict[str, Any] | None = None,
        context_extension: dict[str, Any] | None = None,
        revision: str | None = None,
        dtype: DType = "float32",
        attn_implementation: str = "auto",
        gradient_checkpointing: Checkpointing = False,
        lora: dict[str, Any] | None = None,
        quantization: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
        head_kernel: HeadKernel = "chunked",
        ladder: ContextLadder | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZER["init_args"]),
        lr_scheduler: LRSchedulerCallable = lambda optimizer: torch.optim.lr_scheduler.LinearLR(
            optimizer, **LR_SCHEDULER["init_args"]
        ),
    ) -> None:
        super().__init__()
        check_context(context_length, stride)
        check_window_share(short_window_share)
        check_normalised(objective, short_window_share)
        self.save_hyperparameters(ignore=["objective", "ladder", "optimizer", "lr_scheduler"])
        self.objective = objective
        self.context_length = context_length
        self.stride = stride
        self.ladder = ladder
        self.short_dtype: ShortDType | None = short_dtype
        self.short_window_share = short_window_share
        self._loading: dict[str, Any] = {
            "pretrained_model_name_or_path": pretrained_model_name_or_path,
            "model_config": model_config,
            "context_extension": context_extension,
            "revision": revision,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "gradient_checkpointing": gradient_checkpointing,
            "lora": lora,
            "quantization": quantization,
            "trust_remote_code": trust_remote_code,
            "head_kernel": head_kernel,
        }
        # Of stored weights that stay as they are no checkpoint needs a copy; `on_load_checkpoint` checks what it lacks.
        stays = lora is not None and not changes_base(lora)
        self._adapters_only = stays and has_weights(pretrained_model_name_or_path)
        self._fingerprint: str | None = None
        self.strict_loading = not self._adapters_only
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._statistics = TrainingStatistics(objective, drawn=objective.uses_short_context and short_window_share < 1)

    def check_early(self, sequence_length: int | None, sequence_parallel_size: int = 1) -> None:
        """Refuse what can be known to fail before any text is tokenised or any weight is loaded.

        Args:
            sequence_length: Tokens per training row, if there is training.
            sequence_parallel_size: Processes that share a row.

        Raises:
            ValueError: If the model cannot be found, built or extended, it rotates by the length of the text, no token
                of a row would have a short context, or the package of the head kernel is missing.
        """
        check_installed(self._loading["head_kernel"])
        if not self.objective.uses_short_context and (self.short_dtype is not None or self.short_window_share < 1):
            rank_zero_warn(
                f"`short_dtype` and `short_window_share` have no effect: {type(self.objective).__name__} looks at no"
                " short context."
            )
        if sequence_length is not None and self.objective.uses_short_context:
            check_context(self.context_length, self.stride, sequence_length)
        names = ("pretrained_model_name_or_path", "model_config", "context_extension", "revision", "trust_remote_code")
        config = load_config(**{name: self._loading[name] for name in names})
        check_sequence_parallelism(config, sequence_parallel_size, self._loading["attn_implementation"])
        if has_weights(path := self._loading["pretrained_model_name_or_path"]):
            check_weight_files(path)
        if self._loading["lora"] is not None:  # peft tells of wrong names and values when it builds
            load_backbone(**{**self._loading, "quantization": None}, with_weights=False)
        self._check_trainable(config, fits=sequence_length is not None)
        if sequence_length is not None:
            check_static(config, compares=self.objective.uses_short_context)

    def _check_trainable(self, config: PreTrainedConfig, *, fits: bool) -> None:
        """Raise a ``ValueError`` for quantised weights that are missing, or that training would have to change."""
        path, quantization = self._loading["pretrained_model_name_or_path"], self._loading["quantization"]
        if quantization is not None:
            check_quantization(path, config)
            quantization_config(quantization, compute_dtype=torch.float32)
        quantized = quantization is not None or getattr(config, "quantization_config", None) is not None
        if fits and quantized and self._loading["lora"] is None:
            raise ValueError("Quantised weights cannot be trained: set `model.lora`, which trains adapters over them.")

    @override
    def configure_model(self) -> None:
        if "backbone" not in self._modules:
            self.backbone = self._load_backbone()
            # Now: `precision: bf16-true` rounds the weights only after a checkpoint is read.
            self._fingerprint = frozen_fingerprint(self) if self._adapters_only else None

    def _load_backbone(self) -> Backbone:
        if not self._trainer:
            return load_backbone(**self._loading)
        if self.trainer.strategy.root_device.type == "mps":
            raise ValueError("Corpus sums are float64, which Apple's GPUs do not have: set `trainer.accelerator: cpu`.")
        if (group := self._sequence_group) is not None:
            self.check_early(None, group.size)
            self._loading["attn_implementation"] = "sdpa"  # in the place of `auto`, which may be another
        backbone = load_trainer_backbone(self.trainer, **self._loading)
        self.to(self.trainer.strategy.root_device)  # metrics, and what the module says of its device
        return backbone

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self._make_optimizer(trainable)
        scheduler = self._make_lr_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # --------------------------------------------------------------------------------------------------- checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what adapters leave as it was, for 7B 27 GB in each checkpoint; its fingerprint stands for it."""
        if self.run_id is not None:
            checkpoint[RUN_ID] = self.run_id
        # For `longce export`.
        made = made_tokenizer(getattr(self.trainer, "datamodule", None))
        checkpoint[KEY] = stored(self.backbone.base_model, self.training_facts(), made)
        if self._adapters_only:
            checkpoint[TRAINED] = [name for name, part in self.named_parameters() if part.requires_grad]
            checkpoint[FINGERPRINT] = self._fingerprint
            if not saves_parts(self.trainer.strategy):
                checkpoint["state_dict"] = trained_state(self, checkpoint["state_dict"])

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if KEY in checkpoint:
            check_same_model(checkpoint[KEY], self.backbone.base_model, self._loading)
        if self._trainer and self.trainer.state.fn == "fit":
            check_resumable(checkpoint)
        if not self._adapters_only:
            check_same_weights(checkpoint.get("state_dict"), self.state_dict())
            return
        # The strategies that divide the model have taken the weights out already.
        there = checkpoint.get("state_dict", checkpoint.get(TRAINED, ()))
        if missing := {name for name, part in self.named_parameters() if part.requires_grad}.difference(there):
            raise ValueError(
                f"The checkpoint lacks {len(missing)} of the weights that `model.lora` trains ({min(missing)}, ..):"
                " give the `lora` of the run that wrote it."
            )
        if "state_dict" in checkpoint:
            own = {name: part for name, part in self.named_parameters() if part.requires_grad}
            check_same_weights({name: there[name] for name in own}, own)
        if not same_frozen(checkpoint.get(FINGERPRINT), self._fingerprint):
            raise ValueError(
                "The checkpoint's adapters were trained on other weights than those of"
                f" '{self._loading['pretrained_model_name_or_path']}' (or on the same in another `dtype`): give the"
                " model, revision and dtype of that run."
            )

    # ------------------------------------------------------------------------------------------------------ training

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.backbone.check_token_ids(batch)
        if self._sequence_group is not None:
            self._sequence_group.check_same(batch)
        objective = self.objective.at_step(self.global_step)
        weighing = Weighing(objective.influence, *self._stored_influence(batch))
        if objective.uses_short_context:
            check_context(self.context_length, self.stride, batch["input_ids"].shape[1])
            # Before the long pass, so that its buffers never meet the activations kept for the backward pass.
            weighing = Weighing(objective.influence, *self._short_pass(batch, batch_idx))
        exchange = None
        if (group := self._sequence_group) is not None:
            batch, weighing, exchange = group.part(batch), group.part_of_weighing(weighing), group.attend
        loss, log_likelihood, influence = self.backbone(batch, weighing, exchange=exchange)
        self._check_finite(loss, batch_idx)
        self._statistics.update(log_likelihood, influence, batch["labels"], cap=objective.largest_weight)
        if self.token_observer is not None:
            self.token_observer(log_likelihood, influence, weighing, batch["labels"])
        return loss

    def _short_pass(self, batch: PackedBatch, batch_idx: int) -> ShortContext:
        # Batches of all epochs: a resumed run goes on counting. Each process draws for itself, unless it shares rows.
        batches = self.trainer.fit_loop.epoch_loop.total_batch_idx if self._trainer else batch_idx
        seed = zlib.crc32(f"{torch.initial_seed()} {batches} {self.global_rank}".encode())
        if (group := self._sequence_group) is not None:
            seed = group.agreed(seed)
        with short_precision(self.backbone.decoder, self.device, self.short_dtype):
            return self.backbone.short_log_likelihood(
                batch,
                context_length=self.context_length,
                stride=self.stride,
                window_share=self.short_window_share,
                seed=seed,
                shared_by=None if group is None else group.processes,
            )

    @override
    def on_fit_start(self) -> None:
        check_short_dtype(self.short_dtype, self.device)
        check_cap(self.objective, getattr(self.trainer.datamodule, "influence_cap", None))  # type: ignore[attr-defined]
        check_static(self.backbone.base_model.config, compares=self.objective.uses_short_context)
        # Hugging Face models arrive in eval mode and Lightning keeps it: dropout and checkpointing would be off.
        self.backbone.train()
        self._check_backbone()
        tokenizer = loaded_tokenizer(self.trainer.datamodule)  # type: ignore[attr-defined]
        if tokenizer is not None and has_weights(path := self._loading["pretrained_model_name_or_path"]):
            warn_of_other_tokenizer(tokenizer, path, self._loading["revision"])
        if self.objective.uses_short_context and self.backbone.has_dropout:
            rank_zero_warn(
                "The model has dropout: it is on where the loss is computed and off in the short context, so that part"
                " of every token weight is noise. Set `attention_dropout` and `lora_dropout` to 0."
            )

    @override
    def on_fit_end(self) -> None:
        if self.trainer.num_training_batches == 0:
            raise ValueError("There is nothing to train on: the training set has no batch. Check `data` and its paths.")

    @override
    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> None:
        if not self.backbone.training:
            raise RuntimeError("The model is in eval mode, so dropout and gradient checkpointing are off.")
        self._statistics.start_clock()

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._statistics.stop_clock()

    def stop_clock(self) -> None:
        """What follows, until the next batch, is not training time."""
        self._statistics.stop_clock()

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        """Sum up the gradients of all tokens of a step; `on_before_optimizer_step` makes a mean of the sum.

        The mean of the batches' means would count the tokens of a batch with few of them (padding, prompts that are
        not learned, the last rows of an epoch) for more than others.
        """
        share = self._statistics.batch_tokens / REFERENCE_TOKENS
        loss.register_hook(lambda gradient: gradient * share.to(gradient.dtype))

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take gradients and log the means over all tokens of the step, of all its batches and processes."""
        values = self._statistics.compute(self.trainer.strategy)
        # Lightning has divided the loss by the batches of a step, the strategy the gradients by the processes.
        divided_by = REFERENCE_TOKENS * self.trainer.accumulate_grad_batches * self.trainer.world_size
        divide_gradients(self.parameters(), self._statistics.step_divisor / divided_by)
        self._statistics.reset()
        self.log_dict({f"train/{name}": value for name, value in values.items()}, batch_size=1)
        self.log("loss", values["loss"], prog_bar=True, logger=False, batch_size=1)

    def _stored_influence(self, batch: PackedBatch) -> tuple[Tensor | None, Tensor | None]:
        """Weights that come with the rows, in the place of short log-likelihoods that are there for every token."""
        stored = batch.get("influence")
        check_influence(self.objective, None if stored is None else "that come with the rows")
        return stored, None if stored is None else torch.ones_like(stored, dtype=torch.bool)

    def _check_finite(self, loss: Tensor, batch_idx: int) -> None:
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss.item()} at step {self.global_step}, batch {batch_idx} of epoch"
                f" {self.current_epoch} (process {self.global_rank}). Training stops here:"
                " lower the learning rate, clip gradients (`trainer.gradient_clip_val`) or check the data of the batch."
            )

    # -------------------------------------------------------------------------------------------------------- export

    def training_facts(self) -> TrainingFacts:
        """What is known of the run so far, for checkpoints and for the card of an exported model."""
        return TrainingFacts(
            **loading_facts(self._loading, self.backbone.base_model.config),
            **objective_facts(self.objective, self.context_length, self.stride),
            **run_facts(self.trainer, self._evaluated_at),
        )
