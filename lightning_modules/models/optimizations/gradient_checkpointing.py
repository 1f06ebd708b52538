"""Activation checkpointing that keeps what is dear to compute and cheap to keep: the outputs of attention."""

from contextlib import AbstractContextManager
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from lightning_modules.models.context_extension.patterns import PATTERNS

Checkpointing = bool | Literal["selective"]
"""``true`` keeps the input of each layer only; ``selective`` the outputs of its attention as well."""

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


def enable_checkpointing(model: PreTrainedModel, kind: Checkpointing) -> None:
    """Recompute the activations of each layer in the backward pass.

    With ``selective`` attention is not computed a second time, which at long rows is the dearest part of a layer:
    gradients are the same bit for bit, and each layer keeps ``T * heads * head_dim`` numbers more.

    Args:
        model: A Hugging Face model.
        kind: What is kept; ``false`` changes nothing.

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
