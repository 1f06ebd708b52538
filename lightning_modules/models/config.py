"""Settings to load a causal LM; importable without torch."""

from dataclasses import dataclass
from typing import Any, Literal

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
"""Dtype of the weights; ``auto`` keeps the stored one."""

Checkpointing = bool | Literal["selective"]
"""``true`` keeps only the input of each layer; ``selective`` also keeps the outputs of its attention."""


@dataclass(frozen=True)
class ModelConfig:
    """Settings to load a causal LM.

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights. For random weights, a ``config.json``
            file, or null and a `model_config` with a ``model_type``.
        model_config: Values that override the model's config; dictionaries (``rope_parameters``) are merged by key.
        context_extension: Method to extend the model's context: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`.
        revision: Branch, tag or commit on the hub.
        dtype: Dtype of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers. ``auto`` on a GPU in half precision is ``flash_attention_3`` on Hopper,
            else ``flash_attention_2``, whichever is installed or in the cache of the `kernels` hub; otherwise ``sdpa``.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass. ``selective`` keeps the
            outputs of attention, which is faster and takes ``tokens * hidden size`` more numbers per layer.
        offload_activations: Keep the layer inputs that checkpointing keeps in host memory. The GPU waits for each copy.
        residual_dtype: Dtype of the residual stream between layers with float32 weights in ``bf16-mixed``. ``float32``
            doubles the memory of the layer inputs. FSDP2 ignores it: it gathers weights in bfloat16.
        compile: Compile the decoder layers with torch.compile, except attention and the last layer; takes minutes.
        lora: Arguments of ``peft.LoraConfig``; the other weights are frozen. ``modules_to_save: embeddings-and-norms``
            also trains those in full, as in LongLoRA.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: frozen weights in 4 or 8 bits, as in QLoRA.
        trust_remote_code: Run code from the model's repository. Enable it only for repositories that you trust.
    """

    pretrained_model_name_or_path: str | None = None
    model_config: dict[str, Any] | None = None
    context_extension: dict[str, Any] | None = None
    revision: str | None = None
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    gradient_checkpointing: Checkpointing = False
    offload_activations: bool = False
    residual_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compile: bool = False
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("`offload_activations` needs checkpointing: set `gradient_checkpointing` to true.")
