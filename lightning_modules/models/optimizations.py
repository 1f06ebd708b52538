"""Ways to compute the same with less memory or time, and the states that a model is in meanwhile."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lightning_modules.models.config import Checkpointing
from lightning_modules.models.context_extension.patterns import PATTERNS

ShortDType = Literal["bfloat16"]
"""Type of the short pass, by autocast; weights keep theirs."""

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Operators whose outputs (``[B, T, H, D]``, and a number per row for their backward pass) are kept."""


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Let go of each weight's half-precision copy after its use; each is used once, and together they are the model."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, and afterwards put each submodule back into the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def short_precision(device: torch.device, dtype: ShortDType | None) -> AbstractContextManager[Any]:
    """Compute a short pass in `dtype`: its log-likelihoods weigh tokens and are not differentiated."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=torch.bfloat16)


def enable_checkpointing(model: PreTrainedModel, kind: Checkpointing) -> None:
    """Recompute the activations of each layer in the backward pass.

    With ``selective`` attention is not computed a second time, which at long rows is the dearest part of a layer:
    gradients are the same bit for bit, and each layer keeps ``T * heads * head_dim`` numbers more.

    Raises:
        ValueError: If ``kind`` is another word, or the outputs of the model's attention cannot be told from others.
    """
    if not kind:
        return
    attention = model.config._attn_implementation
    if kind not in (True, "selective"):
        raise ValueError(f"`gradient_checkpointing` must be true, false or 'selective', got {kind!r}.")
    if kind == "selective" and not attention.startswith(("sdpa", "document_sdpa", "flash_attention_2")):
        raise ValueError(
            "`gradient_checkpointing: selective` keeps the outputs of sdpa and flash_attention_2, and this model has"
            f" '{attention}': set `attn_implementation` to one of them, or `gradient_checkpointing: true`."
        )
    rope_type = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    if kind == "selective" and rope_type in PATTERNS:
        raise ValueError(
            f"`gradient_checkpointing: selective` keeps the outputs of torch's attention, and the pattern '{rope_type}'"
            " computes its own: set `gradient_checkpointing: true`."
        )
    arguments: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        arguments["context_fn"] = _keep_attention
    # The older name is deprecated, the newer one not in all versions that are supported.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)


def _keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def last_layer_reads_from(decoder: nn.Module, start: int) -> Iterator[None]:
    """Within, the last layer works out queries, attention output and MLP only from position ``start`` on.

    Keys and values need every token, the rest of the last layer only those that are read. Its output for
    earlier positions has no meaning. A decoder whose last layer is not of the common build (``self_attn.q_proj``,
    ``self_attn.o_proj``, ``mlp``) does all of its work as ever.
    """
    handles = []
    for part in _parts(decoder) if start > 0 else ():
        handles.append(part.register_forward_pre_hook(lambda _, inputs: (_cut(inputs[0], start), *inputs[1:])))
        handles.append(part.register_forward_hook(lambda _, __, output: _put_back(output, start)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(decoder: nn.Module) -> list[nn.Module]:
    """The modules of the last layer that work on each token by itself and are not needed for keys and values."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        return []
    attention, mlp = (getattr(layers[-1], name, None) for name in ("self_attn", "mlp"))
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), mlp]
    return [part for part in parts if isinstance(part, nn.Module)] if None not in parts else []


def _cut(hidden_states: Tensor, start: int) -> Tensor:
    return hidden_states[:, start:].contiguous()  # experts take all tokens of a batch for one list


def _put_back(output: Any, start: int) -> Any:
    """Zeros for the positions left out."""
    if not isinstance(output, Tensor):  # an MLP of experts may give its router's logits as well
        return (_put_back(output[0], start), *output[1:])
    whole = output.new_zeros(output.shape[0], start + output.shape[1], *output.shape[2:])
    whole[:, start:] = output
    return whole
