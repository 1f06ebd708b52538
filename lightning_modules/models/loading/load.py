"""Loading of a causal LM from a hub id, a local folder or a config."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any, Literal, TypeGuard

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.context_extension.length_dependent import forget_earlier_lengths
from lightning_modules.models.context_extension.rope_types import own_type
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.adapters import add_adapters, find_adapters, load_adapters, quantization_config
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig, is_served
from lightning_modules.models.loading.dtypes import report_dtype, scoring_config, stored_dtype
from lightning_modules.models.loading.file_checks import check_config, check_weight_files, pickles_refused
from lightning_modules.models.loading.gguf.conversion import model_folder
from lightning_modules.models.optimizations import (
    can_compile,
    compile_layers,
    enable_checkpointing,
    fuse_norms,
    use_bfloat16_residual,
)
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
    path = config.pretrained_model_name_or_path
    stored = load_config(config)
    # 1. Choose dtype and attention before anything is built.
    dtype = stored_dtype(stored, config.dtype)
    attention = choose_attention(config, stored, device=device, autocast=autocast)
    log.info("Attention implementation of %s: %s.", stored.model_type, attention)
    settings: dict[str, Any] = {
        "dtype": "auto" if config.dtype == "auto" else dtype,
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
        if _is_on(config.fused_norms, device):
            fuse_norms(model)
        kind = config.gradient_checkpointing
        layers = config.checkpointed_layers
        enable_checkpointing(model, kind, layers=layers, offload=config.offload_activations)
        if autocast and config.residual_dtype == "bfloat16":
            use_bfloat16_residual(model)
        if config.lora is not None:
            model = add_adapters(model, config.lora, autocast=autocast)
    adapters = find_adapters(path)
    if adapters is not None:
        model = load_adapters(model, adapters, with_weights=with_weights)
    # 3. Wrap it: from here on, it computes log-likelihoods instead of logits.
    backbone = Backbone(model)
    _compile(backbone, config, device)
    return backbone


def _compile(backbone: Backbone, config: ModelConfig, device: torch.device | str) -> None:
    backbone.needs_compiled = config.compile is True
    if _is_on(config.compile, device) and (backbone.needs_compiled or can_compile(backbone.decoder)):
        compile_layers(backbone.decoder)


def _is_on(option: bool | Literal["auto"], device: torch.device | str) -> bool:
    """Return whether an option is on, where ``auto`` means on a GPU."""
    return option is True or (option == "auto" and torch.device(device).type == "cuda")


def load_frozen(config: ModelConfig, device: torch.device | str) -> Backbone:
    """Load a model for scoring: on its device, in eval mode, frozen, and compared with its own logits.

    The dtype ``auto`` is resolved by `scoring_config`, and the result is logged.
    """
    stored = load_config(config)
    asked = config
    config = scoring_config(config, stored, device)
    if asked.dtype == "auto" and torch.device(device).type == "cpu":
        report_dtype(stored_dtype(stored), stored_dtype(stored, config.dtype))
    backbone = load_backbone(config, device=device).eval().requires_grad_(False).to(device)
    check_scoring(backbone)
    report_progress(backbone.decoder)  # after the check, so that its passes do not count
    return backbone


def load_scorer(config: ModelConfig, device: torch.device | str) -> Scorer:
    """Load a model like `load_frozen`, or connect to its server."""
    if is_served(config.pretrained_model_name_or_path):
        return connect(config)
    return load_frozen(config, device)


def check_model(config: ModelConfig) -> PreTrainedConfig | None:
    """Check a model without loading its weights, and return its config; None for a served one, which is probed."""
    if is_served(config.pretrained_model_name_or_path):
        connect(config)
        return None
    stored = load_config(config)
    if has_weights(config.pretrained_model_name_or_path):
        check_weight_files(config.pretrained_model_name_or_path)
    return stored


def has_weights(pretrained_model_name_or_path: str | None) -> TypeGuard[str]:
    """Return whether a model has stored weights; a model with only a config gets random weights."""
    return pretrained_model_name_or_path is not None and not pretrained_model_name_or_path.endswith(".json")


def check_quantization(pretrained_model_name_or_path: str | None, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` unless the model has stored weights that are not quantized yet."""
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
    if config.pretrained_model_name_or_path is not None:
        loaded = _load_stored_config(config)
        _check_keys(overrides, loaded)
        with _model_config_named(overrides):
            for name, value in overrides.items():
                setattr(loaded, name, _merge(getattr(loaded, name), value))
    elif "model_type" in overrides:
        with _model_config_named(overrides):
            defaults = AutoConfig.for_model(overrides["model_type"])
        _check_keys(overrides, defaults)
        with _model_config_named(overrides):
            loaded = AutoConfig.for_model(**overrides)
    else:
        raise ValueError("Set `pretrained_model_name_or_path`, or the `model_type` of `model_config`.")
    check_config(loaded, trust_remote_code=config.trust_remote_code)
    # Before the model is built: a later change would be saved, but have no effect.
    extend_config(loaded, config.context_extension)
    with _model_config_named(overrides):
        loaded.validate()
    return loaded


def _merge(current: Any, value: Any) -> Any:
    """Return the value, merged into the present one by key if both are dictionaries, also inside them."""
    if not (isinstance(current, dict) and isinstance(value, dict)):
        return value
    # Gemma 3 has RoPE parameters for each kind of layer, and transformers would ignore others beside them.
    other = [key for key, part in value.items() if not isinstance(part, dict)]
    if other and current and all(isinstance(part, dict) for part in current.values()):
        raise ValueError(f"'{other[0]}' must be inside one of {', '.join(current)}")
    return {**current, **{key: _merge(current.get(key), part) for key, part in value.items()}}


def _load_stored_config(config: ModelConfig) -> PreTrainedConfig:
    path = str(config.pretrained_model_name_or_path)
    revision = config.revision
    adapters = find_adapters(path)
    if adapters is not None:
        path = adapters.config
        revision = adapters.revision
    path = model_folder(path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises all kinds of errors for wrong values
        raise ValueError(not_loaded("model", path, error, plan="config.json")) from error


def _check_keys(overrides: dict[str, Any], config: PreTrainedConfig) -> None:
    for name in overrides:
        if not hasattr(config, str(name)):  # YAML has keys of other types
            hint = did_you_mean(name, config.to_dict())
            raise ValueError(f"`model_config` has '{name}', but {type(config).__name__} has no such key. {hint}")


@contextlib.contextmanager
def _model_config_named(overrides: dict[str, Any]) -> Iterator[None]:
    """Name `model_config` in errors of transformers, which raises all kinds of them for wrong values."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"`model_config` = {overrides} is not a valid config: {reason}") from error


def choose_attention(
    config: ModelConfig, stored: PreTrainedConfig, *, device: torch.device | str = "cpu", autocast: bool = False
) -> str:
    """Return the attention implementation that a model gets on a device, without loading it."""
    implementation = config.attn_implementation
    if implementation == "auto":
        return _choose_fastest(config, stored, device=torch.device(device), autocast=autocast)
    if implementation == "flash_attention_3" and importlib.util.find_spec("flash_attn_interface") is None:
        implementation = FLASH_3_KERNEL
    is_of_hub = "/" in implementation
    if implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        is_of_hub = True  # transformers uses the flash attention of the `kernels` package
    if is_of_hub and not is_kernels_available():
        raise ValueError(
            f"`attn_implementation: {implementation}` needs flash-attn (the extra `flash`) for FlashAttention-2, or the"
            f" package kernels, from version {KERNELS_MIN_VERSION} to below {KERNELS_MAX_VERSION}: install it, or set"
            " `sdpa`."
        )
    return implementation


def _choose_fastest(config: ModelConfig, stored: PreTrainedConfig, *, device: torch.device, autocast: bool) -> str:
    """Return the fastest attention implementation that is installed."""
    model_class = _model_class(stored)
    # Flash attention has kernels for half precision only.
    half = autocast or stored_dtype(stored, config.dtype) in (torch.bfloat16, torch.float16)
    rope_type = own_type(stored.get_text_config(decoder=True))
    has_backend = rope_type is None or "flash_attention_2" in rope_type.backends
    if half and device.type == "cuda" and model_class._supports_flash_attn and has_backend:
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        if hopper and importlib.util.find_spec("flash_attn_interface") is not None:
            return "flash_attention_3"
        if importlib.util.find_spec("flash_attn") is not None:
            return "flash_attention_2"
    if model_class._supports_sdpa:
        return "sdpa"
    return "eager"


def register_attention(implementation: str, stored: PreTrainedConfig) -> str:
    """Return the name under which transformers finds an attention implementation.

    If the model allows it, ``sdpa`` becomes `document_attention`, which isolates packed documents without a mask.
    """
    if implementation == "sdpa" and _model_class(stored)._supports_attention_backend:
        return register_document_attention()
    return implementation


def _model_class(stored: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM._model_mapping.get(type(stored), PreTrainedModel)


def _load_weights(
    path: str, config: PreTrainedConfig, revision: str | None, settings: dict[str, Any]
) -> PreTrainedModel:
    check_weight_files(path)
    adapters = find_adapters(path)
    if adapters is not None:
        path = adapters.base
        revision = adapters.revision
    path = model_folder(path)
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
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning("'%s' has %d unused tensors, unknown to its config (%s, ..).", path, len(unused), unused[0])
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"The weights of '{path}' lack {len(missing)} tensors ({', '.join(missing[:3])}, ..), which would be"
            " random: the folder is incomplete, or its model is not a causal LM."
        )
    return model
