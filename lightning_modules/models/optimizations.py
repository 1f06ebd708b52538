"""Memory and speed optimizations that do not change results, and context managers for a model's modes."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_modules.models.context_extension.frequencies import global_parameters
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.context_extension.rope_types import wrap_attention
from lightning_modules.models.loading.config import Checkpointing

ATTENTION_OPERATORS = re.compile(
    r"aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?"
    r"|torch_attn::_varlen_attn|flash_attn::_flash_attn(_varlen)?_forward"
    # FlashAttention-3 dispatches both kinds of sequences to one operator, which older releases call directly.
    r"|flash_attn_3::(_flash_attn_forward|fwd)"
    # The `kernels` hub appends the backend and the commit of a kernel to its name: `_flash_attn3_cuda_9aa33c0`.
    r"|_(vllm_)?flash_attn[23]_\w+::(_flash_attn(_varlen)?_forward|(varlen_)?fwd)"
)
"""Operators whose outputs selective checkpointing keeps: ``[B, T, H, D]`` and statistics for the backward pass."""


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Free the half-precision copy of each weight after its use; together, cached copies are as large as the model."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch to eval mode, and restore the mode of each submodule afterwards."""
    # Frozen parts may be in eval mode already, so one flag for all would not restore them.
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True


def use_bfloat16_residual(model: nn.Module) -> None:
    """Under bfloat16 autocast, cast the input of each layer, and with it the residual stream, to bfloat16.

    Embeddings in float32 would make it float32: autocast casts the inputs of matrix products, and not sums. After the
    first layer's cast, only experts return float32. Rotary angles and learned positions stay float32.
    """
    for layer in _find_checkpointed(model):
        layer.register_forward_pre_hook(_cast_hidden_states)


def _cast_hidden_states(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not inputs or inputs[0].dtype != torch.float32:  # models from a repository may pass keyword arguments
        return None
    device = inputs[0].device.type
    half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return (inputs[0].bfloat16(), *inputs[1:]) if half else None


def enable_checkpointing(
    model: PreTrainedModel, kind: Checkpointing, *, layers: int | None = None, offload: bool = False
) -> None:
    """Recompute the activations of the first ``layers`` layers, by default of all, in the backward pass.

    The last layers keep their activations if not all can, because the backward pass frees those first.

    ``auto`` is chosen before a model is loaded, by `longce fit`; here it means ``true``. With ``selective``, attention
    is not recomputed, which is the most expensive part of a layer for long sequences. Gradients are identical, and each
    layer keeps ``T * heads * head_dim`` more numbers. With ``offload``, the layers' inputs, but not these numbers, are
    kept in pinned host memory. The stream that computes also copies them, and waits.
    """
    if not kind:
        return
    attention = model.config._attn_implementation
    if kind == "selective" and not can_keep_attention(attention, model.config):
        rope_type = global_parameters(model.config).get("rope_type")
        raise ValueError(
            "`gradient_checkpointing: selective` supports the attention implementations sdpa, flash_attention_2 and"
            f" flash_attention_3 and no attention patterns, but the model has '{attention}' and RoPE of type"
            f" '{rope_type}': set `gradient_checkpointing: true`, or another `attn_implementation`."
        )
    # The reentrant kind needs an input with a gradient, which frozen embeddings do not give.
    arguments: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    # The older name is deprecated, and the newer one does not exist in all supported versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)
    if layers is not None:
        _checkpoint_first(model, layers)
    if offload:
        for layer in _find_checkpointed(model):
            layer._gradient_checkpointing_func = partial(_run_offloaded, layer._gradient_checkpointing_func)


def can_keep_attention(attention: str, config: PreTrainedConfig) -> bool:
    """Return whether ``selective`` checkpointing supports an attention implementation and the model's RoPE type."""
    rope_type = global_parameters(config).get("rope_type")
    return re.search(r"sdpa$|flash[a-z_-]*[23]\b", attention) is not None and rope_type not in PATTERNS


def _checkpoint_first(model: Any, count: int) -> None:
    """Turn checkpointing off in all layers for text but the first ``count``."""
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    # An encoder of pictures has another number of layers, or is not in the decoder.
    layers = next(part for part in lists if len(part) == number)
    found = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
    if count > len(found):
        raise ValueError(
            f"`checkpointed_layers` = {count} exceeds the {len(found)} layers of the model that can be checkpointed one"
            " by one: lower it, or remove it."
        )
    for layer in found[count:]:
        layer.gradient_checkpointing = False


def _find_checkpointed(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _run_offloaded(checkpoint: Callable[..., Any], *args: Any) -> Any:
    # Inside, the hooks of the checkpoint replace these, which therefore see its inputs only.
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return checkpoint(*args)


def _keep_attention(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    kept = ATTENTION_OPERATORS.fullmatch(operator.name())
    # `PREFER` leaves it to torch.compile to keep more.
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def can_compile(decoder: Any) -> bool:
    """Return whether `compile_layers` supports a decoder."""
    return isinstance(getattr(decoder, "layers", None), nn.ModuleList)


def compile_layers(decoder: Any, *, backend: str = "inductor") -> None:
    """Compile the norms, attention projections and MLPs of all decoder layers, at their first use.

    Whole layers are not compiled: attention would be compiled again for each number of documents, and torch does not
    compile any part of a checkpointed layer in which a function is excluded.
    """
    if not can_compile(decoder):
        raise ValueError(
            f"`compile: true` does not support `{type(decoder).__name__}`, which has no `layers`: remove it."
        )
    # The wrapper is not compiled, so graphs end at attention.
    wrap_attention(decoder.config._attn_implementation)
    # With and without gradient and autocast, for one or several sequences of fixed or variable length.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    for layer in decoder.layers:
        for part in layer.children():
            part.compile(backend=backend)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module has compiled parts."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def remove_compiled(module: nn.Module) -> None:
    """Run all parts as written from now on."""
    for part in module.modules():
        part._compiled_call_impl = None


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run compiled parts as written. With a key-value cache, each layer and length would be compiled."""
    parts = {part: part._compiled_call_impl for part in module.modules() if part._compiled_call_impl is not None}
    for part in parts:
        # torch.compile of a module replaces this attribute; the module itself stays as it is.
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, compiled in parts.items():
            part._compiled_call_impl = compiled


class FusedNorm(NamedTuple):
    """Formula of a module's root mean square norm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

    epsilon: float
    offset: float  # added to the weight: 1 in Gemma
    keeps_dtype: bool  # of the input; otherwise, a float32 weight makes the result float32


def fuse_norms(model: nn.Module) -> int:
    """Compute the root mean square norms of a model by ``torch.nn.functional.rms_norm``; return their number.

    On a GPU, this is one kernel instead of six. It rounds once, at the end, where most models round before they
    multiply by the weight. Modules, names of weights and other kinds of norms do not change.
    """
    fused = 0
    modules: Iterator[Any] = model.modules()
    for module in modules:
        norm = _recognize_norm(module)
        if norm is not None:
            # Attributes of the module, and not a closure, so that copies of it use their own weights.
            module.fused_norm = norm
            module.forward = MethodType(_fused_forward, module)
            fused += 1
    return fused


def _recognize_norm(module: nn.Module) -> FusedNorm | None:
    """Return the formula of a module's norm over the last dimension; None if it computes anything else.

    Classes with the same formula have many names, so their outputs are compared, with random weights.
    """
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    # A norm with more inputs, such as a gate, may run without them here, but not in the model.
    one_input = len(inspect.signature(module.forward).parameters) == 1
    if [*parameters] != ["weight"] or not isinstance(epsilon, float) or not one_input or isinstance(module, nn.RMSNorm):
        return None
    generator = torch.Generator().manual_seed(0)
    shape = parameters["weight"].shape
    # On the CPU, even for a model on the meta device. At the smallest of the three scales, epsilon decides the result.
    scales = torch.tensor([[1e-3], [1.0], [30.0]], device="cpu")
    hidden_states = scales * torch.randn(3, *shape, generator=generator, device="cpu")
    weight = torch.randn(shape, generator=generator, device="cpu")
    try:
        values = torch.func.functional_call(module, {"weight": weight}, hidden_states)
        half = torch.func.functional_call(module, {"weight": weight}, hidden_states.bfloat16())
    except (RuntimeError, ValueError, TypeError, IndexError):  # a convolution, for example
        return None
    for offset in (0.0, 1.0):
        expected = F.rms_norm(hidden_states, shape, weight + offset, epsilon)
        if values.shape == expected.shape and torch.allclose(values, expected, rtol=1e-5, atol=1e-6):
            return FusedNorm(epsilon, offset, half.dtype == torch.bfloat16)
    return None


def _fused_forward(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute the norm of `FusedNorm` over the last dimension of ``[.., D]`` hidden states."""
    epsilon, offset, keeps_dtype = module.fused_norm
    # The kernel needs one dtype. In half precision, a sum of weight and offset would lose bits of the weight.
    dtype = torch.promote_types(hidden_states.dtype, torch.float32 if offset else module.weight.dtype)
    weight = module.weight.to(dtype) + offset if offset else module.weight.to(dtype)
    output = F.rms_norm(hidden_states.to(dtype), weight.shape, weight, epsilon)
    # Autocast may have computed it in float32.
    return output.to(hidden_states.dtype if keeps_dtype else dtype)


def fused_norms(module: nn.Module) -> list[nn.Module]:
    """Return the norms that `fuse_norms` has changed."""
    # peft's wrappers of trained modules have the attributes of the modules inside them.
    return [part for part in module.modules() if isinstance(vars(part).get("fused_norm"), FusedNorm)]


@contextlib.contextmanager
def unfused(module: nn.Module) -> Iterator[None]:
    """Compute the norms of `fuse_norms` as written."""
    norms = fused_norms(module)
    for norm in norms:
        del norm.forward
    try:
        yield
    finally:
        for norm in norms:
            norm.forward = MethodType(_fused_forward, norm)
