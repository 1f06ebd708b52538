"""Settings to load a causal LM; importable without torch."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
"""Dtype of the weights; ``auto`` keeps the stored one."""

Checkpointing = bool | Literal["selective", "auto"]
"""``true`` keeps only the input of each layer; ``selective`` also keeps the outputs of its attention; ``auto`` is the
fastest one that fits on the GPU."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings for requests to a served model, given by its address ``http(s)://HOST:PORT`` or several, with commas.

    Args:
        dialect: Kind of the server, ``vllm`` or ``sglang``; ``auto`` asks it.
        model: Name of the model, for a server with several.
        claim: Model that the server runs, such as ``meta-llama/Llama-3.1-8B@main``, as part of the identity of its
            scores. Change it when the server gets another model.
        key_variable: Name of the environment variable that has the server's key.
        concurrency: Maximum number of simultaneous requests to each server.
        timeout: Seconds that a request may take, with its time in the server's queue.
        patience: Seconds to wait for servers that are overloaded or restart.
        allow_http: Send texts and the key unencrypted to other machines, in a network that you trust.
    """

    dialect: Literal["auto", "vllm", "sglang"] = "auto"
    model: str | None = None
    claim: str | None = None
    key_variable: str = "LONGCE_API_KEY"
    concurrency: int = 16
    timeout: float = 600.0
    patience: float = 600.0
    allow_http: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", self.key_variable):  # without the value, which may be the key itself
            raise ValueError("`server.key_variable` must be the name of an environment variable, not the key.")
        if not (self.concurrency >= 1 and self.timeout > 0 and self.patience >= 0):  # also for NaN
            raise ValueError(
                "`server` needs `concurrency` of 1 or more, a `timeout` above 0 and a `patience` of 0 or more, got"
                f" {self.concurrency}, {self.timeout} and {self.patience}."
            )


def is_served(pretrained_model_name_or_path: str | None) -> bool:
    """Return whether a model is named by the address of its server; raise a ``ValueError`` if that has a secret."""
    if re.match(r"https?://", pretrained_model_name_or_path or "") is None:
        return False
    if set("@?#") & set(pretrained_model_name_or_path or ""):  # before configs, logs or messages repeat it
        raise ValueError(
            "The address of a server must be http(s)://HOST:PORT, without user, password, query or fragment: put its"
            " key into the environment variable that `server.key_variable` names."
        )
    return True


def is_gguf(pretrained_model_name_or_path: str | None) -> bool:
    """Return whether a model is a GGUF file, by its name."""
    # A folder may have such a name as well.
    name = pretrained_model_name_or_path or ""
    return name.lower().endswith(".gguf") and not Path(name).expanduser().is_dir()


def local_or_hub(path_or_id: str, kind: str) -> str:
    """Return a local path, with its ``~`` expanded, or a hub id; a ``ValueError`` if it can be neither."""
    local = Path(path_or_id).expanduser()
    if local.is_file() and local.suffix != ".json" and not is_gguf(path_or_id):
        raise ValueError(f"The {kind} '{path_or_id}' is a file: use its folder '{local.parent}'.")
    if path_or_id and local.exists():  # an empty path would be the current folder
        return str(local)
    # Anything else could be a hub id, which only the hub can know.
    if path_or_id.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path_or_id):
        raise ValueError(f"No {kind} at {path_or_id!r}: the file or folder does not exist. Check the path.")
    return path_or_id


def read_key(variable: str) -> str:
    """Return a server's key from an environment variable, or an empty text."""
    key = os.environ.get(variable, "")
    if not key.isascii() or not key.isprintable() or " " in key:  # httpx2 would quote it in its error
        raise ValueError(f"The key in the environment variable {variable} contains invalid characters.")
    return key


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """Options of the commands that load a model.

    Args:
        dtype: Type of the weights; ``auto`` keeps the stored type, but is float32 on a CPU that is slow in it.
        attn_implementation: As in transformers; ``auto`` is flash attention if it is installed.
        compile: Compile the decoder layers with torch.compile, except attention: for many documents on a GPU, because
            it takes minutes. Log-likelihoods differ by rounding.
        trust_remote_code: Run code from the model's repository; only for repositories that you trust.
    """

    dtype: DType = "auto"
    attn_implementation: str = "auto"
    compile: bool = False
    trust_remote_code: bool = False

    def loading(self, name: str, **settings: Any) -> "ModelConfig":
        """Return the settings to load a model with this name."""
        settings |= {field.name: getattr(self, field.name) for field in fields(LoadingOptions)}
        return ModelConfig(name, **settings)

    def check_names(self, others: Iterable[str] = ()) -> None:
        """Raise a ``ValueError`` if a model of these settings or one of ``others`` cannot exist."""
        for name in (getattr(self, "model", None), getattr(self, "evaluator", None), *others):
            if name is not None and not is_served(name):
                local_or_hub(name, "model")


@dataclass(frozen=True)
class ModelConfig:
    """Settings to load a causal LM.

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights. For random weights, a ``config.json``
            file, or null and a `model_config` with a ``model_type``. For scoring, also the address of a server.
        model_config: Values that override the model's config; dictionaries (``rope_parameters``) are merged by key.
        context_extension: Method to extend the model's context: arguments of
            `lightning_modules.models.context_extension.methods.ContextExtension`.
        revision: Branch, tag or commit on the hub.
        dtype: Dtype of the weights; ``auto`` keeps the stored one.
        attn_implementation: As in transformers. ``auto`` on a GPU in half precision is ``flash_attention_3`` on Hopper,
            else ``flash_attention_2``, whichever is installed; otherwise ``sdpa``.
        shifted_sparse_attention: Tokens in a group of shifted sparse attention (S²-Attn of LongLoRA, a quarter of the
            sequence there), an even number: the pass with gradient has it, scores and evaluation have full attention.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass. ``selective`` keeps the
            outputs of attention, which is faster and takes ``tokens * hidden size`` more numbers per layer. With
            ``auto``, `longce fit` on a GPU takes the kind and the number of layers that recompute least and fit
            according to `longce plan`; anywhere else it means ``true``.
        checkpointed_layers: Number of layers that `gradient_checkpointing` recomputes, from the first one, with
            ``true`` or ``selective``; null for all. The others keep their activations.
        offload_activations: Keep the layer inputs that checkpointing keeps in host memory. The GPU waits for each copy.
        residual_dtype: Dtype of the residual stream between layers with float32 weights in ``bf16-mixed``. ``float32``
            doubles the memory of the layer inputs. FSDP2 ignores it: it gathers weights in bfloat16.
        compile: Compile the norms, projections and MLPs of the decoder layers with torch.compile; takes minutes.
            ``auto`` compiles on a GPU, unless torch cannot or the scores would be wrong.
        fused_norms: Compute root mean square norms by torch's kernel, which rounds once. ``auto`` does so on a GPU; on
            a CPU it is not faster.
        lora: Arguments of ``peft.LoraConfig``; the other weights are frozen. ``modules_to_save: embeddings-and-norms``
            also trains those in full, as in LongLoRA.
        quantization: Arguments of ``transformers.BitsAndBytesConfig``: frozen weights in 4 or 8 bits, as in QLoRA.
        trust_remote_code: Run code from the model's repository. Enable it only for repositories that you trust.
        server: Settings for requests to a served model.
    """

    pretrained_model_name_or_path: str | None = None
    model_config: dict[str, Any] | None = None
    context_extension: dict[str, Any] | None = None
    revision: str | None = None
    dtype: DType = "auto"
    attn_implementation: str = "auto"
    shifted_sparse_attention: int | None = None
    gradient_checkpointing: Checkpointing = False
    checkpointed_layers: int | None = None
    offload_activations: bool = False
    residual_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compile: bool | Literal["auto"] = False
    fused_norms: bool | Literal["auto"] = False
    lora: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    trust_remote_code: bool = False
    server: ServerConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.server, dict):  # as the parsers of commands and configs give it
            object.__setattr__(self, "server", ServerConfig(**self.server))
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError("`offload_activations` needs checkpointing: set `gradient_checkpointing` to true.")
        layers = self.checkpointed_layers
        if layers is not None and (layers < 1 or self.gradient_checkpointing not in (True, "selective")):
            raise ValueError(
                "`checkpointed_layers` must be 1 or more, with `gradient_checkpointing` true or selective, got"
                f" {layers} with {str(self.gradient_checkpointing).lower()}."
            )
        group = self.shifted_sparse_attention
        if group is not None and (group < 2 or group % 2):
            raise ValueError(
                "`shifted_sparse_attention` must be an even number of 2 or more, because half of the heads are shifted"
                f" by half a group, got {group}."
            )
        if self.context_extension is not None and is_served(self.pretrained_model_name_or_path):
            raise ValueError(
                f"'{self.pretrained_model_name_or_path}' is a server, which extends its context itself: remove"
                " `context_extension`."
            )
