"""Count the bytes of activations per token by running a model on tensors without data."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import RopeTypeAttention, own_type
from lightning_modules.models.loading.adapters import add_adapters
from lightning_modules.models.optimizations import use_bfloat16_residual

TOKENS = 10_007
"""A prime, see `TokenMemory`."""

PLANNED_ATTENTION = "planned_attention"
"""Name of an attention function that computes nothing, but allocates the memory of flash attention."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes per token of a causal LM, with flash attention or another attention that keeps no token-by-token matrix.

    Weights are in ``dtype``, matrix products in ``autocast``; ``lora`` holds arguments of ``peft.LoraConfig``, and
    ``bfloat16_residual`` is that of `use_bfloat16_residual`. Each number is counted when it is needed, by
    running the last one or two layers without computing anything.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    bfloat16_residual: bool = True
    lora: dict[str, Any] | None = None

    @cached_property
    def layer(self) -> float:
        """Kept by one layer for the backward pass, without checkpointing."""
        return self._train(2, checkpointing=False)[0] - self._train(1, checkpointing=False)[0]

    @cached_property
    def layer_input(self) -> float:
        """Kept by one layer with full checkpointing."""
        return self._train(2, checkpointing=True)[0] - self._checkpointed[0]

    @cached_property
    def layer_backward(self) -> float:
        """Peak of one layer's backward pass, including recomputed activations."""
        return self._checkpointed[1] - self.layer_input

    @cached_property
    def forward(self) -> float:
        """Peak of a pass without gradient."""
        return self._forward[0]

    @cached_property
    def hidden(self) -> float:
        """Last hidden states."""
        return self._forward[1]

    @cached_property
    def _forward(self) -> tuple[float, float]:
        backbone = self._build(1)
        with _fake_tensors(backbone), TokenMemory(TOKENS) as memory, torch.no_grad():
            hidden_states = _run_forward(backbone, self.autocast)
        return memory.peak / TOKENS, hidden_states.untyped_storage().nbytes() / TOKENS

    @cached_property
    def _checkpointed(self) -> tuple[float, float]:
        return self._train(1, checkpointing=True)

    def _build(self, layers: int) -> Backbone:
        backbone = meta_backbone(self.config, dtype=self.dtype, lora=self.lora, layers=layers)
        if self.bfloat16_residual:
            use_bfloat16_residual(backbone.decoder)
        return backbone

    def _train(self, layers: int, *, checkpointing: bool) -> tuple[float, float]:
        """Return bytes per token: kept by the forward pass, and at the peak of both passes."""
        backbone = self._build(layers)
        if checkpointing:
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                backbone.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        # The input of every layer except the first needs a gradient, even with LoRA.
        backbone.base_model.get_input_embeddings().weight.requires_grad_()
        with _fake_tensors(backbone), TokenMemory(TOKENS) as memory:
            hidden_states = _run_forward(backbone, self.autocast)
            kept = memory.alive
            size = hidden_states.untyped_storage().nbytes()
            torch.autograd.backward(hidden_states, torch.empty_like(hidden_states))
        return kept / TOKENS, (memory.peak - 2 * size) / TOKENS


def meta_backbone(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    lora: dict[str, Any] | None = None,
    layers: int | None = None,
) -> Backbone:
    """Return a model, by default with all its layers, on the meta device, where tensors have no memory."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if layers is not None:
        text.num_hidden_layers = layers
        kinds = getattr(text, "layer_types", None)
        if kinds:
            text.layer_types = (kinds * layers)[:layers]
    attention = "sdpa" if own_type(text) else "eager"  # replaced before anything runs
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if lora is not None:
            with warnings.catch_warnings(action="ignore"):
                model = add_adapters(model, lora)
    return Backbone(model).train()


class TokenMemory(TorchDispatchMode):
    """Record the peak of the bytes that are alive at the same time and grow with the number of tokens.

    That number is a large prime, which divides the sizes that grow with it and not those of weights.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _run_operator(func, *args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add_storage(tensor.untyped_storage())
        return result

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._known or size == 0 or size % self.tokens:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._remove_storage(key, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _remove_storage(self, key: int, size: int) -> None:
        del self._known[key]
        self.alive -= size


def _run_operator(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operator; the products of experts, which torch plans in bfloat16 only, in any dtype."""
    if operator is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
        return operator(*args, **kwargs)
    left, right, *others = args
    return operator(left.bfloat16(), right.bfloat16(), *others, **kwargs).to(left.dtype)


def _run_forward(backbone: Backbone, autocast: torch.dtype | None) -> Tensor:
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return backbone.decoder(input_ids=tokens, use_cache=False).last_hidden_state


@contextmanager
def _fake_tensors(backbone: Backbone) -> Iterator[None]:
    """Run a model of the meta device as if on the CPU, without computing; it is unusable afterwards."""
    AttentionInterface.register(PLANNED_ATTENTION, RopeTypeAttention(_planned_attention))
    AttentionMaskInterface.register(PLANNED_ATTENTION, lambda **_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in backbone.modules():
            if isinstance(part, PreTrainedModel):
                part.config._attn_implementation = PLANNED_ATTENTION
                part.config._experts_implementation = "grouped_mm"  # the others depend on where tokens are routed
        backbone.to_empty(device="cpu")
        yield


class _FlashAttention(torch.autograd.Function):
    """Attention that keeps what flash attention keeps: query, key, value, output and a number per token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = value.new_empty(batch, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(batch, heads, tokens, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _planned_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    return _FlashAttention.apply(query, key, value), None
