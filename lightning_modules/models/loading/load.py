"""Loading of a causal LM from a hub id, a local folder or a config."""

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.length_dependent import forget_earlier_lengths
from lightning_modules.models.context_extension.methods import extend_config
from lightning_modules.models.context_extension.rope_types import own_type
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.adapters import add_adapters, find_adapters, load_adapters, quantization_config
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig, is_served
from lightning_modules.models.loading.dtypes import report_dtype, scoring_config, stored_dtype
from lightning_modules.models.loading.file_checks import check_config, check_sizes, check_weight_files, pickles_refused
from lightning_modules.models.loading.gguf.conversion import model_folder
from lightning_modules.models.loading.size_checks import check_parameters, check_sizes_of, check_stored_sizes
from lightning_modules.models.optimizations import compile_layers, enable_checkpointing, use_bfloat16_residual
from lightning_modules.models.progress import report_progress
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.served.scorer import connect
from lightning_modules.models.tokenization.tokenizer import not_loaded
from lightning_modules.utilities.errors import did_you_mean

log = logging.getLogger(__name__)

FLASH_3_KERNEL = "kernels-community/flash-attn3"
"""FlashAttention-3 of the `kernels` hub. In that of vLLM, which transformers prefers, the backward pass was broken."""


def load_backbone(
    config: ModelConfig, *, device: torch.device | str = "cpu", autocast: bool = False, with_weights: bool = True
) -> Backbone:
    """Load a causal LM into main memory, to be moved to its device and scored or trained there.

    ``device`` and half-precision ``autocast`` decide which attention implementation is used. Without weights, all
    tensors are on the meta device, which takes no memory.
    """
    path, stored = config.pretrained_model_name_or_path, load_config(config)
    # 1. Choose dtype and attention before anything is built.
    dtype = stored_dtype(stored, config.dtype)
    attention = choose_attention(config, stored, device=device, autocast=autocast)
    log.info("Attention implementation of %s: %s.", stored.model_type, attention)
    settings: dict[str, Any] = {
        "dtype": config.dtype if config.dtype == "auto" else dtype,
        "attn_implementation": register_attention(attention, stored),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.quantization is not None:
        check_quantization(path, stored)
        compute_dtype = torch.bfloat16 if autocast else dtype
        settings["quantization_config"] = quantization_config(config.quantization, compute_dtype=compute_dtype)
        settings["device_map"] = {"": torch.device(device)}  # the default of transformers is the first GPU
    # 2. Build the model; without weights, no tensor takes memory.
    with contextlib.nullcontext() if with_weights else torch.device("meta"):
        if with_weights and has_weights(path):
            model = _load_weights(path, stored, config.revision, settings)
        else:
            model = AutoModelForCausalLM.from_config(stored, **{**settings, "dtype": dtype})
        if with_weights:
            check_rotary(model)
        forget_earlier_lengths(model)
        enable_checkpointing(model, config.gradient_checkpointing, offload=config.offload_activations)
        if autocast and config.residual_dtype == "bfloat16":
            use_bfloat16_residual(model)
        if config.lora is not None:
            model = add_adapters(model, config.lora, autocast=autocast)
    if (adapters := find_adapters(path)) is not None:
        model = load_adapters(model, adapters, with_weights=with_weights)
    # 3. Wrap it: from here on, it computes log-likelihoods instead of logits.
    backbone = Backbone(model)
    if config.compile:
        compile_layers(backbone.decoder)
    return backbone


def load_frozen(config: ModelConfig, device: torch.device | str) -> Backbone:
    """Load a model for scoring: on its device, in eval mode, frozen, and compared with its own logits.

    The dtype ``auto`` is that of `scoring_config`, and the log says so.
    """
    stored = load_config(config)
    asked, config = config, scoring_config(config, stored, device)
    if asked.dtype == "auto" and torch.device(device).type == "cpu":
        report_dtype(stored_dtype(stored), stored_dtype(stored, config.dtype))
    backbone = load_backbone(config, device=device).eval().requires_grad_(False).to(device)
    check_scoring(backbone)
    report_progress(backbone.decoder)  # after the check, whose passes are no progress
    return backbone


def load_scorer(config: ModelConfig, device: torch.device | str) -> Scorer:
    """Load a model like `load_frozen`, or connect to its server."""
    return connect(config) if is_served(config.pretrained_model_name_or_path) else load_frozen(config, device)


def check_model(config: ModelConfig) -> PreTrainedConfig | None:
    """Check a model without loading its weights, and return its config; None for a served one, which is probed."""
    if is_served(config.pretrained_model_name_or_path):
        connect(config)
        return None
    stored = load_config(config)
    if has_weights(config.pretrained_model_name_or_path):
        check_weight_files(config.pretrained_model_name_or_path)
        check_parameters(stored, config.pretrained_model_name_or_path)
    return stored


def has_weights(pretrained_model_name_or_path: str | None) -> TypeGuard[str]:
    """Return whether a model has stored weights; a model with only a config gets random weights."""
    return pretrained_model_name_or_path is not None and not pretrained_model_name_or_path.endswith(".json")


def check_quantization(pretrained_model_name_or_path: str | None, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` if there are no stored weights to quantize, or they are already quantized."""
    is_quantized = getattr(config, "quantization_config", None) is not None
    if is_quantized or not has_weights(pretrained_model_name_or_path):
        raise ValueError(
            "`quantization` needs stored weights that are not quantized, which"
            f" '{pretrained_model_name_or_path}' does not have: set another hub id or folder, or remove `quantization`."
        )


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """Load the model's config, with the overrides of `model_config` and the context extension, and validate it."""
    if is_served(config.pretrained_model_name_or_path):
        raise ValueError(
            f"'{config.pretrained_model_name_or_path}' is a server, which gives log-likelihoods only, but this needs"
            " the model itself: name a hub id or a local folder."
        )
    overrides = dict(config.model_config or {})
    check_sizes(overrides)  # first, because some configs make a list of such a length
    if config.pretrained_model_name_or_path is not None:
        loaded = _load_stored_config(config)
        _check_keys(overrides, loaded)
        for name, value in overrides.items():
            _override_value(loaded, name, value)
    elif "model_type" in overrides:
        loaded = _make_config(overrides)
    else:
        raise ValueError("Set `pretrained_model_name_or_path`, or the `model_type` of `model_config`.")
    check_config(loaded, trust_remote_code=config.trust_remote_code)
    # Before the model is built: a later change would be saved, but have no effect.
    extend_config(loaded, config.context_extension)
    with _model_config_named(overrides):
        loaded.validate()
    return loaded


def _load_stored_config(config: ModelConfig) -> PreTrainedConfig:
    path, revision = str(config.pretrained_model_name_or_path), config.revision
    if (adapters := find_adapters(path)) is not None:
        path, revision = adapters.config, adapters.revision
    path = model_folder(path)
    check_stored_sizes(path, revision, config.model_config)
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises all kinds of errors for wrong values
        raise ValueError(not_loaded("model", path, error, plan="config.json")) from error


def _make_config(overrides: dict[str, Any]) -> PreTrainedConfig:
    """Build a config from its values alone."""
    check_sizes_of(overrides)
    with _model_config_named(overrides):
        known = AutoConfig.for_model(overrides["model_type"])
        _check_keys(overrides, known)
        return AutoConfig.for_model(**overrides)


@contextlib.contextmanager
def _model_config_named(overrides: dict[str, Any]) -> Iterator[None]:
    """Name `model_config` in errors of transformers, which raises all kinds of them for wrong values."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"`model_config` = {overrides} is not a valid config: {_join_lines(error)}") from error


def _override_value(config: PreTrainedConfig, name: str, value: Any) -> None:
    current = getattr(config, name)
    if isinstance(current, dict) and not isinstance(value, dict | None):
        raise ValueError(f"`model_config.{name}` must be a mapping, such as {current}, got {value!r}.")
    try:
        setattr(config, name, {**current, **value} if isinstance(current, dict) and value is not None else value)
    except Exception as error:  # transformers checks some values immediately
        raise ValueError(f"`model_config.{name}` = {value!r}: {_join_lines(error)}") from error


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def choose_attention(
    config: ModelConfig, stored: PreTrainedConfig, *, device: torch.device | str = "cpu", autocast: bool = False
) -> str:
    """Return the attention implementation that a model gets on a device, without loading it."""
    implementation, model_class = config.attn_implementation, _model_class(stored)
    if implementation == "auto":
        implementation = "sdpa" if model_class._supports_sdpa else "eager"
        rope_type = own_type(stored.get_text_config(decoder=True))
        # Flash attention has kernels for half precision only.
        half = autocast or stored_dtype(stored, config.dtype) in (torch.bfloat16, torch.float16)
        flash = half and torch.device(device).type == "cuda" and model_class._supports_flash_attn
        if flash and (rope_type is None or "flash_attention_2" in rope_type.backends):
            implementation = _find_flash(hub=rope_type is None) or implementation
    elif implementation == "flash_attention_3" and importlib.util.find_spec("flash_attn_interface") is None:
        implementation = FLASH_3_KERNEL
    # Without flash-attn, transformers uses the flash attention of the `kernels` package.
    flash_2 = implementation.startswith("flash_attention_2") and importlib.util.find_spec("flash_attn") is None
    if (flash_2 or "/" in implementation) and not is_kernels_available():
        package = "flash-attn (the extra `flash`) or " if flash_2 else ""
        raise ValueError(
            f"`attn_implementation: {implementation}` needs {package}the package kernels, from version"
            f" {KERNELS_MIN_VERSION} to below {KERNELS_MAX_VERSION}: install it, or set `sdpa`."
        )
    return implementation


def register_attention(implementation: str, stored: PreTrainedConfig) -> str:
    """Return the name under which transformers finds an attention implementation.

    If the model allows it, ``sdpa`` becomes `document_attention`, which isolates packed documents without a mask.
    """
    isolates = implementation == "sdpa" and _model_class(stored)._supports_attention_backend
    return register_document_attention() if isolates else implementation


def _model_class(stored: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM._model_mapping.get(type(stored), PreTrainedModel)


def _find_flash(*, hub: bool) -> str | None:
    """Return the fastest flash attention that is installed or, with ``hub``, was downloaded before."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        return "flash_attention_3"
    if hopper and hub and _load_cached_kernel():
        return FLASH_3_KERNEL
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") is not None else None


def _load_cached_kernel() -> bool:
    """Load FlashAttention-3 of the hub if it was downloaded before, and return whether it fits this machine."""
    cache = Path(os.environ.get("KERNELS_CACHE") or HF_HUB_CACHE)
    snapshots = sorted(cache.glob(f"*--{FLASH_3_KERNEL.replace('/', '--')}/snapshots/*"), key=os.path.getmtime)
    if not snapshots or not is_kernels_available():
        return False
    # `kernels` loads this path without asking the hub for a newer version, which would fail offline.
    others = [
        entry for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry and FLASH_3_KERNEL not in entry
    ]
    os.environ["LOCAL_KERNELS"] = ":".join([*others, f"{FLASH_3_KERNEL}={snapshots[-1]}"])
    try:
        lazy_import_flash_attention(FLASH_3_KERNEL)
    except Exception as error:  # any kind: it may be for another version of torch or CUDA
        log.warning("The kernel '%s' cannot be loaded and is not used: %s", snapshots[-1], error)
        return False
    return True


def _check_keys(overrides: dict[str, Any], config: PreTrainedConfig) -> None:
    for name in overrides:
        if not isinstance(name, str) or not hasattr(config, name):
            hint = did_you_mean(name, config.to_dict())
            raise ValueError(f"`model_config` has '{name}', but {type(config).__name__} has no such key. {hint}")


def _load_weights(
    path: str, config: PreTrainedConfig, revision: str | None, settings: dict[str, Any]
) -> PreTrainedModel:
    check_weight_files(path)
    if (adapters := find_adapters(path)) is not None:
        path, revision = adapters.base, adapters.revision
    path = model_folder(path)
    check_weight_files(path)
    check_parameters(config, path)
    try:
        with pickles_refused(path):
            model, report = AutoModelForCausalLM.from_pretrained(
                path, config=config, revision=revision, output_loading_info=True, **settings
            )
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises all kinds of errors for a wrong config
        if "mismatched" in str(error):
            error = ValueError("the shapes of its tensors do not match its config, see the table above")
        raise ValueError(not_loaded("model", path, error)) from error
    if unused := sorted(report["unexpected_keys"]):
        log.warning("'%s' has %d unused tensors, unknown to its config (%s, ..).", path, len(unused), unused[0])
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"The weights of '{path}' lack {len(missing)} tensors ({', '.join(missing[:3])}, ..), which would be"
            " random: the folder is incomplete, or its model is not a causal LM."
        )
    return model
