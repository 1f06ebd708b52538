"""How a causal LM is loaded; importable without torch."""

from dataclasses import dataclass
from typing import Any, Literal

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
"""Type of the weights; ``auto`` keeps the stored one."""

Checkpointing = bool | Literal["selective"]
"""``true`` keeps the input of each layer only; ``selective`` the outputs of its attention as well."""


@dataclass(frozen=True)
class ModelConfig:
    """How a causal LM is loaded.

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights; a ``config.json`` file, or null with a
            `model_config` that names a ``model_type``, for random weights.
        model_config: Values for the model's config; dictionaries (``rope_parameters``) are merged key by key.
        context_extension: How the model's context is extended: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`.
        revision: Branch, tag or commit on the hub.
        dtype: Type of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers; ``auto`` is ``flash_attention_2`` where it is installed and the model
            runs on a GPU in half precision, else ``sdpa``.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass; with ``selective`` all but
            the outputs of attention, which is faster and takes ``tokens * hidden size`` numbers per layer more.
        lora: Arguments of ``peft.LoraConfig``; the other weights are frozen. ``modules_to_save: embeddings-and-norms``
            trains those in full as well, as LongLoRA does.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: frozen weights in 4 or 8 bits, as in QLoRA.
        trust_remote_code: Run code from the model's repository; off unless you trust it.
    """

    pretrained_model_name_or_path: str | None = None
    model_config: dict[str, Any] | None = None
    context_extension: dict[str, Any] | None = None
    revision: str | None = None
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    gradient_checkpointing: Checkpointing = False
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    trust_remote_code: bool = False
