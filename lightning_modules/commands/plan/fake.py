"""A model without weights or memory of its own, to count what the real one would hold and keep."""

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_modules.models.adapters import add_adapters
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import RopeTypeAttention, own_type

PLANNED_ATTENTION = "planned_attention"
"""Our name for a stand-in of flash attention: it computes nothing and holds what flash attention holds."""


def meta_backbone(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    lora: dict[str, Any] | None = None,
    layers: int | None = None,
) -> Backbone:
    """The model of a config on the meta device, where tensors have a shape and no memory.

    Args:
        config: Of a causal LM; it is not changed.
        dtype: Of the weights.
        lora: Arguments of `add_adapters`; the other weights are frozen.
        layers: Keep this many of the last layers; by default all.

    Raises:
        ValueError: If the config belongs to no causal LM, or peft refuses ``lora``.
    """
    attention = "sdpa" if own_type(config.get_text_config(decoder=True)) else "eager"  # replaced before anything runs
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
        if layers is not None:
            _keep_last_layers(Backbone(model), layers)
        if lora is not None:
            with warnings.catch_warnings(action="ignore"):
                model = add_adapters(model, lora)
    return Backbone(model).train()


@contextmanager
def fake_run(backbone: Backbone) -> Iterator[None]:
    """Let a model of the meta device run as if it were on the CPU, computing nothing; it is of no other use then."""
    AttentionInterface.register(PLANNED_ATTENTION, RopeTypeAttention(_planned_attention))
    AttentionMaskInterface.register(PLANNED_ATTENTION, lambda **_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in backbone.modules():
            if isinstance(part, PreTrainedModel):
                part.config._attn_implementation = PLANNED_ATTENTION
            if callable(getattr(part, "_apply_gate", None)):  # transformers' mark of a mixture of experts
                part.forward = functools.partial(_planned_experts, part)
            for name, parameter in part.named_parameters(recurse=False):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                part.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        yield


def decoder_layers(backbone: Backbone) -> tuple[nn.Module, str, nn.ModuleList]:
    """The decoder's layers, with the module that holds them and the name it knows them by.

    Raises:
        ValueError: If the decoder has no list of as many layers as its config says.
    """
    count = backbone.base_model.config.get_text_config(decoder=True).num_hidden_layers
    for name, part in backbone.decoder.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            parent, _, leaf = name.rpartition(".")
            return backbone.decoder.get_submodule(parent), leaf, part
    raise ValueError(
        f"`{type(backbone.base_model).__name__}` keeps its {count} layers in no list: it cannot be planned."
    )


def _keep_last_layers(backbone: Backbone, count: int) -> None:
    parent, name, layers = decoder_layers(backbone)
    config = backbone.base_model.config.get_text_config(decoder=True)
    if count > len(layers):  # the same one again
        config.num_hidden_layers, kinds = count, getattr(config, "layer_types", None)
        if kinds:
            config.layer_types = (kinds * count)[:count]
    setattr(parent, name, nn.ModuleList([layers[-1 - index % len(layers)] for index in range(count)]))


class TokenMemory(TorchDispatchMode):
    """Peak of the bytes that are alive at the same time and grow with the number of tokens.

    Args:
        tokens: A large prime: sizes it divides grow with the tokens, those of weights and their gradients do not.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0 or size % self.tokens:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.alive -= size


class _FlashAttention(torch.autograd.Function):
    """What flash attention allocates and keeps: query, key, value, output and one number per row and head."""

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
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _FlashAttention.apply(query, key, value), None


def _planned_experts(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each token through as many experts as it chooses, all of them the first one: where it goes takes no memory."""
    tokens, width = hidden_states.shape
    chosen = hidden_states[torch.arange(top_k_index.numel()) // top_k_index.shape[-1]]
    inner = _expert(experts, chosen, experts.gate_up_proj if experts.has_gate else experts.up_proj)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    output = _expert(experts, inner, experts.down_proj) * top_k_weights.reshape(-1, 1)
    return output.view(tokens, -1, width).sum(1).to(hidden_states.dtype)


def _expert(experts: Any, inputs: Tensor, weights: Tensor) -> Tensor:
    return F.linear(inputs, weights[0].T if experts.is_transposed else weights[0])
