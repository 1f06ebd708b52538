"""Bytes that each token takes in a model: kept for the backward pass, and while one layer is at work."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from lightning_modules.commands.plan.fake import TokenMemory, fake_run, meta_backbone
from lightning_modules.models.backbone import Backbone

TOKENS = 10_007
"""A prime, see `TokenMemory`."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes per token, with flash attention or another one that keeps no matrix of token by token.

    Attributes:
        layer: What one layer keeps for the backward pass without checkpointing.
        layer_input: What it keeps with full checkpointing.
        attention_output: What it keeps besides with selective checkpointing.
        layer_backward: Largest need of one layer's backward pass, its recomputed activations included.
        forward: Largest need of a pass that keeps nothing.
        hidden: Last hidden states.
    """

    layer: float
    layer_input: float
    attention_output: float
    layer_backward: float
    forward: float
    hidden: float


def activation_bytes(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    lora: dict[str, Any] | None = None,
) -> ActivationBytes:
    """Run the last one and two layers of a model without computing anything, and count.

    Args:
        config: Of a causal LM.
        dtype: Of the weights.
        autocast: Of the matrix products in mixed precision; None without.
        lora: Arguments of ``peft.LoraConfig``.

    Raises:
        ValueError: If the model cannot run without values.
    """
    run = _Run(config, dtype, autocast, lora)
    (one, _, hidden), (two, _, _) = (run.train(layers, checkpointing=False) for layers in (1, 2))
    (one_input, peak, _), (two_inputs, _, _) = (run.train(layers, checkpointing=True) for layers in (1, 2))
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "v_head_dim", None) or getattr(text, "head_dim", None)
    width = text.num_attention_heads * (head_dim or text.hidden_size // text.num_attention_heads)
    return ActivationBytes(
        layer=two - one,
        layer_input=two_inputs - one_input,
        attention_output=width * (autocast or dtype).itemsize,
        layer_backward=peak - (two_inputs - one_input),
        forward=run.score(),
        hidden=hidden,
    )


@dataclass(frozen=True)
class _Run:
    """A model with few layers, run once with `TOKENS` tokens; results are bytes per token."""

    config: PreTrainedConfig
    dtype: torch.dtype
    autocast: torch.dtype | None
    lora: dict[str, Any] | None

    def train(self, layers: int, *, checkpointing: bool) -> tuple[float, float, float]:
        """Bytes alive after the forward pass, at the peak of forward and backward pass, and of the hidden states."""
        backbone = self._backbone(layers)
        if checkpointing:
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                backbone.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        # With LoRA, too, the input of all layers but the first has a gradient.
        backbone.base_model.get_input_embeddings().weight.requires_grad_()
        with fake_run(backbone), TokenMemory(TOKENS) as memory:
            hidden_states = self._forward(backbone)
            kept, size = memory.alive, hidden_states.untyped_storage().nbytes()
            gradient = torch.empty_like(hidden_states)
            torch.autograd.backward(hidden_states, gradient)
        return kept / TOKENS, (memory.peak - 2 * size) / TOKENS, size / TOKENS

    def score(self) -> float:
        """Peak bytes of a pass that keeps nothing."""
        backbone = self._backbone(1)
        with fake_run(backbone), TokenMemory(TOKENS) as memory, torch.no_grad():
            self._forward(backbone)
        return memory.peak / TOKENS

    def _backbone(self, layers: int) -> Backbone:
        return meta_backbone(self.config, dtype=self.dtype, lora=self.lora, layers=layers)

    def _forward(self, backbone: Backbone) -> torch.Tensor:
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        try:
            with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                return backbone.decoder(input_ids=tokens, use_cache=False).last_hidden_state
        except RuntimeError as error:  # torch refuses what depends on the values of tensors
            name = type(backbone.base_model).__name__
            message = f"`{name}` cannot run on tensors without values, so it cannot be planned: {error}"
            raise ValueError(message) from error
