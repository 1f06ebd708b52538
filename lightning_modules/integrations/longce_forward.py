"""LongCE as the loss of a Hugging Face model, for any trainer that calls ``model(.., labels=..)``."""

import contextlib
import inspect
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_modules.batch import PackedBatch, batch_of_inputs, batch_to
from lightning_modules.functional import long_cross_entropy
from lightning_modules.models.attention import DOCUMENT_SDPA, register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.adapters import is_peft_model
from lightning_modules.models.loading.checks import check_attention_window, check_scoring, has_training_noise
from lightning_modules.models.short_context import ShortContextConfig, ShortMethod
from lightning_modules.objectives import LongCE, Objective, find_step_dependent

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_READ = ("input_ids", "labels", "attention_mask", "position_ids")

_DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch")
"""Inputs that follow from the others, or belong to the loss."""

_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
"""Inputs that only packed documents have."""

_ATTRIBUTE = "_longce"

_TRL = (
    "TRL's `SFTTrainer` computes its own loss from the model's log-likelihoods: call `Trainer.compute_loss` in"
    " training, as in docs/recipes/trl_sft.py."
)


def apply_longce(
    model: "PreTrainedModel | PeftModel",
    *,
    context_length: int = 4096,
    stride: int = 1024,
    objective: Objective | None = None,
    short_method: ShortMethod = "windows",
) -> None:
    """Train a Hugging Face causal LM with LongCE in any trainer that calls ``model(.., labels=..)``.

    In train mode, ``model(input_ids, labels=labels)`` returns the LongCE loss, without logits. In eval mode, or without
    labels, it is the model's own ``forward``. All of it happens inside ``forward``, so DDP, FSDP2, gradient
    accumulation and gradient checkpointing work as with the model's own loss. The loss is divided by
    ``num_items_in_batch`` if the trainer passes it, and otherwise by the number of scored tokens. ``position_ids``
    start at 0, and documents begin where they restart; ``attention_mask`` marks padding, and tokens with the label -100
    are not scored.

    Call it before or after the model gets adapters, and before DDP and FSDP2 wrap it.

    Args:
        model: A causal LM of transformers, or a peft model around one.
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window.
        objective: Token weights of the loss; by default `LongCE`.
        short_method: ``windows`` for the paper's short windows; ``sliding_window`` approximates them by one pass whose
            attention is limited to K tokens.

    Raises:
        TypeError: If the model is not a Hugging Face model.
        ValueError: If the model is not a causal LM or has LongCE already, if the objective needs more than the inputs
            of the model, or if no token could have a context that is longer than the short one.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=1, max_position_embeddings=64)).train()
        >>> apply_longce(model, context_length=4, stride=2)
        >>> ids = torch.arange(8).unsqueeze(0)
        >>> model(input_ids=ids, labels=ids).loss.backward()
    """
    base = find_causal_lm(model)
    objective = LongCE() if objective is None else objective
    _check_objective(objective)
    if _ATTRIBUTE in vars(base):
        raise ValueError("The model has LongCE already: call `remove_longce` first to change its settings.")
    short_context = ShortContextConfig(context_length, stride, short_method)
    backbone = Backbone(base)
    limit = backbone.max_length
    if limit is not None and short_context.window_length >= limit:
        raise ValueError(
            f"`context_length` + `stride` = {short_context.window_length} must be below the {limit} positions of"
            f" `{type(base).__name__}`, or no token has a longer context than the short one: lower them."
        )
    forward = LongCEForward(backbone, short_context, objective)
    setattr(base, _ATTRIBUTE, forward)
    base.forward = forward


def remove_longce(model: "PreTrainedModel | PeftModel") -> None:
    """Give a model back the ``forward`` that it had before `apply_longce`.

    Raises:
        ValueError: If the model has no LongCE.
    """
    base = find_causal_lm(model)
    forward = vars(base).get(_ATTRIBUTE)
    if forward is None:
        raise ValueError(f"`{type(base).__name__}` does not use LongCE, so there is nothing to remove.")
    forward.remove()
    delattr(base, _ATTRIBUTE)


class LongCEForward:
    """The ``forward`` of a model with LongCE: the loss in train mode with labels, and otherwise the model's own.

    A module's ``forward`` is called inside its hooks, so that DDP and FSDP2 see one forward pass.
    """

    def __init__(self, backbone: Backbone, short_context: ShortContextConfig, objective: Objective) -> None:
        model = backbone.base_model
        self.backbone = backbone
        self.short_context = short_context
        self.objective = objective
        self.plain = model.forward
        self._replaces = vars(model).get("forward")  # of the instance, in place of that of the class
        self._is_removed = False
        self._is_running = False
        self._is_checked = False
        self._reported: set[str] = set()
        # Packed documents need no mask, and a window limits attention; without either it is torch's, as before.
        self._uses_document_attention = (
            model.config._attn_implementation == "sdpa" and model._supports_attention_backend
        )
        if self._uses_document_attention:
            model.set_attn_implementation(register_document_attention())
        self._guard = self.backbone.decoder.register_forward_pre_hook(self._check_not_bypassed)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the model's own ``forward``, by which trainers choose columns and options."""
        return inspect.signature(self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the LongCE loss in train mode with labels; otherwise, the output of the model's own ``forward``."""
        model = self.backbone.base_model
        if args and args[0] is model:  # accelerate may rebind it as a method
            args = args[1:]
        inputs = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        has_labels = inputs.get("labels") is not None
        with self._running():
            if self._is_removed or not (model.training and has_labels):
                self._report_unused(has_labels)
                return self.plain(*args, **kwargs)
            loss = self._compute_loss(inputs)
        output = CausalLMOutputWithPast(loss=loss)
        return output.to_tuple() if inputs.get("return_dict") is False else output

    def _compute_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Return the loss of ``[B, T]`` inputs, by the functions of `LongContextLM.training_step`."""
        batch = self._read_batch(inputs)
        self._check_model()
        short = None
        if self.objective.uses_short_context:
            short = self.short_context.score(self.backbone, batch)
        long = self.backbone(batch)
        token_weights = self.objective(long.detach(), short, batch)
        divisor = inputs.get("num_items_in_batch")
        if divisor is not None:  # 0 if no token of the step is scored
            divisor = torch.as_tensor(divisor, device=long.device).clamp(min=1)
        return long_cross_entropy(long, token_weights, batch["labels"], divisor=divisor)

    def _read_batch(self, inputs: dict[str, Any]) -> PackedBatch:
        """Return the inputs as a batch on the device of the model, or raise an error for those that it lacks."""
        if inputs.get("fused_lm_head"):
            raise RuntimeError(_TRL)
        if inputs.get("input_ids") is None:
            raise ValueError("LongCE needs `input_ids`: `inputs_embeds` and prompt learning are not supported.")
        _check_documents(inputs)
        others = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        others = [name for name in others if name not in (*_READ, *_DERIVED)]
        if others:
            raise ValueError(f"LongCE does not support the inputs {', '.join(others)}: leave them out.")
        # A MoE would be trained without the loss that balances its experts.
        config = self.backbone.base_model.config.get_text_config(decoder=True)
        if inputs.get("output_router_logits", getattr(config, "output_router_logits", False)):
            raise ValueError(
                "LongCE does not support the auxiliary loss of a router: set `output_router_logits` to false."
            )
        batch = batch_of_inputs(*(inputs.get(name) for name in _READ))  # type: ignore[arg-type]
        check_device(inputs["input_ids"].device, self.backbone.device)
        self.backbone.check_batch(batch)
        longest = max(stop - start for row in batch["document_boundaries"] for start, stop in pairwise(row))
        shortest = self.short_context.window_length
        if self.objective.uses_short_context and longest <= shortest:
            self._report_once(
                "short documents",
                f"No document of a batch has more than `context_length` + `stride` = {shortest} tokens (the longest has"
                f" {longest}): the loss of such a batch is cross entropy. Lower them if most documents are as short.",
            )
        return batch_to(batch, self.backbone.device)

    def _check_model(self) -> None:
        """Compare scores with the model's own logits, once for a device and precision, as `LongContextLM` does."""
        modules = list(self.backbone.base_model.modules())
        # 1. If each pass gathers sharded weights, all processes must run the same number of passes.
        self.backbone.is_sharded = any(isinstance(module, FSDPModule) for module in modules)
        check_sharding(self.backbone.base_model)
        check_scoring(self.backbone)
        # 2. Checks that are needed only once, because their results do not change during training.
        if self._is_checked:
            return
        self._is_checked = True
        check_rotary(self.backbone.base_model)
        if not self.objective.uses_short_context:
            return
        if self.short_context.method == "sliding_window":
            check_attention_window(self.backbone)
        if has_training_noise(self.backbone):
            log.warning(
                "The model has dropout or noise in its router, which adds noise to every token weight: it is on in the"
                " long pass and off in the short one. Set its dropout and `lora_dropout` to 0."
            )

    def _check_not_bypassed(self, decoder: nn.Module, _: Any) -> None:
        """Raise a ``RuntimeError`` if the model trains by another ``forward``, which does not call this one."""
        if self._is_running or not self.backbone.base_model.training or not torch.is_grad_enabled():
            return
        name = type(self.backbone.base_model).__name__
        raise RuntimeError(
            f"`{name}` would be trained without LongCE: its `forward` was replaced after `apply_longce`, or bypasses"
            f" it. Call `apply_longce` after the replacement, or call `remove_longce`. {_TRL}"
        )

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        was_running = self._is_running
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = was_running

    def _report_unused(self, has_labels: bool) -> None:
        """Warn about calls that look like training, but do not use this loss."""
        if self._is_removed or not torch.is_grad_enabled():
            return
        if has_labels:
            self._report_once(
                "eval mode",
                "The model is in eval mode, so its loss is cross entropy: call `train()` to train it with LongCE, or"
                " `torch.no_grad()` to evaluate it.",
            )
        elif self.backbone.base_model.training:
            self._report_once(
                "no labels",
                "The model is called without `labels` in train mode: a loss that the trainer computes from its logits"
                " is not LongCE. Remove `label_smoothing_factor` or `compute_loss_func` if you set them.",
            )

    def _report_once(self, reason: str, message: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            log.warning(message)

    def remove(self) -> None:
        """Restore the model's own ``forward``, even inside wrappers that were added around this one later."""
        self._guard.remove()
        self._is_removed = True
        model = self.backbone.base_model
        if self._uses_document_attention and self.backbone.attention == DOCUMENT_SDPA:
            model.set_attn_implementation("sdpa")
        if vars(model).get("forward") is not self:
            return
        if self._replaces is None:
            del model.forward
        else:
            model.forward = self._replaces


def check_device(given: torch.device, own: torch.device) -> None:
    """Raise a ``ValueError`` for inputs on another GPU than the model, as replicas of `nn.DataParallel` get them."""
    if given.index is not None and own.index is not None and given != own:
        raise ValueError(
            f"The inputs are on {given} and the model is on {own}: `nn.DataParallel` is not supported, which trainers"
            " use without torchrun if they see several GPUs. Start with torchrun, or set `CUDA_VISIBLE_DEVICES=0`."
        )


def check_sharding(model: nn.Module) -> None:
    """Raise a ``ValueError`` for weights that are sharded in a way that Hugging Face's ``forward`` alone can gather."""
    is_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    is_zero3 = any(getattr(parameter, "ds_id", None) is not None for parameter in model.parameters())
    if is_fsdp1 or is_zero3:
        raise ValueError("FSDP1 and DeepSpeed ZeRO-3 are not supported: use FSDP2 (`fsdp_version: 2`), DDP or ZeRO-2.")


def find_causal_lm(model: Any) -> PreTrainedModel:
    """Return the Hugging Face model itself, inside its adapters."""
    if is_peft_model(model):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError("LongCE does not support prompt learning: use LoRA or full training.")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"LongCE needs a causal LM of transformers, or a peft model around one, got `{type(model).__name__}`: call"
            " it before the model is wrapped."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"`{type(model).__name__}` is not a causal LM, but an encoder and a decoder.")
    return model


def _check_objective(objective: Objective) -> None:
    """Raise a ``ValueError`` for an objective that needs more than the inputs of a model."""
    if objective.uses_stored is not None:
        raise ValueError(
            f"`objective`: a model does not receive stored {objective.uses_stored} as inputs: use `longce fit`."
        )
    changing = find_step_dependent(objective)
    if changing is not None:
        name = type(changing).__name__
        raise ValueError(f"`objective`: `{name}` depends on the training step: use `longce fit`.")


def _check_documents(inputs: dict[str, Any]) -> None:
    """Raise a ``ValueError`` for a key-value cache, and for packed documents without positions to separate them."""
    mask = inputs.get("attention_mask")
    if inputs.get("past_key_values") is not None or not (mask is None or isinstance(mask, Tensor)):
        raise ValueError("LongCE needs whole sequences: omit `past_key_values`, and masks that are not tensors.")
    if inputs.get("position_ids") is None:
        numbered = mask is not None and bool((mask > 1).any())
        packed = [name for name in _PACKING if inputs.get(name) is not None]
        if packed or numbered:
            named = ", ".join(packed) or "`attention_mask` with numbers of documents"
            raise ValueError(f"LongCE finds packed documents by `position_ids`: pass them in addition to {named}.")
