"""Load a causal LM from a hub id, a local folder or a bare config."""

import contextlib
import importlib.util
import logging
import pickle
from typing import Any, TypeGuard

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightning_modules.models.adapters import add_adapters, quantization_config
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_config, check_scoring, check_sizes, check_weight_files
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.context_extension.methods import extend_config
from lightning_modules.models.context_extension.rope_types import own_type
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.optimizations import enable_checkpointing
from lightning_modules.models.tokenization.tokenizer import local_or_hub, not_loaded
from lightning_modules.utilities.errors import did_you_mean
from lightning_modules.utilities.pickles import refused_pickle

log = logging.getLogger(__name__)

_FLASH_PACKAGES = ("flash_attn", "kernels")


def load_backbone(
    config: ModelConfig, *, device: torch.device | str = "cpu", autocast: bool = False, with_weights: bool = True
) -> Backbone:
    """Load a causal LM into main memory, ready to be moved, and then scored or trained.

    Its attention depends on the device where it will run, and on whether that is under half-precision ``autocast``.
    Without weights, all tensors are on the meta device, where they have a shape and no memory.

    Raises:
        ValueError: If the model cannot be found, built or extended, or lacks weights.
    """
    path, stored = config.pretrained_model_name_or_path, load_config(config)
    dtype = (stored.dtype or torch.float32) if config.dtype == "auto" else getattr(torch, config.dtype)
    half = autocast or dtype in (torch.bfloat16, torch.float16)
    flash = half and torch.device(device).type == "cuda"
    settings: dict[str, Any] = {
        "dtype": config.dtype if config.dtype == "auto" else dtype,
        "attn_implementation": resolve_attention(config.attn_implementation, stored, flash=flash),
        "trust_remote_code": config.trust_remote_code,
    }
    if config.quantization is not None:
        check_quantization(path, stored)
        compute_dtype = torch.bfloat16 if autocast else dtype
        settings["quantization_config"] = quantization_config(config.quantization, compute_dtype=compute_dtype)
        settings["device_map"] = {"": torch.device(device)}  # or transformers takes the first GPU
    with contextlib.nullcontext() if with_weights else torch.device("meta"):
        if with_weights and has_weights(path):
            model = _load_weights(path, stored, config.revision, settings)
        else:
            model = AutoModelForCausalLM.from_config(stored, **{**settings, "dtype": dtype})
        if with_weights:
            check_rotary(model)
        enable_checkpointing(model, config.gradient_checkpointing)
        if config.lora is not None:
            model = add_adapters(model, config.lora, autocast=autocast)
    return Backbone(model)


def load_frozen(config: ModelConfig, device: torch.device | str) -> Backbone:
    """Load a model for scoring: on its device, without dropout and gradients, and checked against its own logits."""
    backbone = load_backbone(config, device=device).eval().requires_grad_(False).to(device)
    check_scoring(backbone)
    return backbone


def has_weights(pretrained_model_name_or_path: str | None) -> TypeGuard[str]:
    """Whether a model has stored weights; one that is only described by its config gets random ones."""
    return pretrained_model_name_or_path is not None and not pretrained_model_name_or_path.endswith(".json")


def check_quantization(pretrained_model_name_or_path: str | None, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` if the weights to quantize are missing, or quantized already."""
    if not has_weights(pretrained_model_name_or_path):
        raise ValueError("`quantization` needs stored weights: name a hub id or a folder, or leave it out.")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"'{pretrained_model_name_or_path}' is stored with quantized weights: leave `quantization` out."
        )


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """Load the model's config, with the values of `model_config` in place, then extended, checked by transformers.

    Raises:
        ValueError: If it cannot be found or extended, or neither a path nor a ``model_type`` is given.
    """
    overrides = dict(config.model_config or {})
    check_sizes(overrides)  # some configs make a list of that length
    if config.pretrained_model_name_or_path is not None:
        found = _stored_config(config)
        _check_keys(overrides, found)
        for name, value in overrides.items():
            _override(found, name, value)
    elif "model_type" in overrides:
        found = _new_config(overrides)
    else:
        raise ValueError("Name a model by `pretrained_model_name_or_path`, or by the `model_type` of a `model_config`.")
    check_config(found, trust_remote_code=config.trust_remote_code)
    extend_config(found, config.context_extension)
    try:
        found.validate()
    except Exception as error:
        raise ValueError(f"`model_config` = {overrides} makes no model: {_in_one_line(error)}") from error
    return found


def _stored_config(config: ModelConfig) -> PreTrainedConfig:
    path = local_or_hub(str(config.pretrained_model_name_or_path), "model")
    try:
        values, _ = PreTrainedConfig.get_config_dict(path, revision=config.revision)
    except Exception:  # which the next lines report
        values = {}
    check_sizes(values)
    try:
        return AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises any kind for wrong values
        raise ValueError(not_loaded("model", path, error)) from error


def _new_config(overrides: dict[str, Any]) -> PreTrainedConfig:
    """A config that is not stored anywhere."""
    try:
        known = AutoConfig.for_model(overrides["model_type"])
        _check_keys(overrides, known)
        return AutoConfig.for_model(**overrides)
    except Exception as error:  # as above
        raise ValueError(f"`model_config` = {overrides} makes no model: {_in_one_line(error)}") from error


def _override(config: PreTrainedConfig, name: str, value: Any) -> None:
    own = getattr(config, name)
    if isinstance(own, dict) and not isinstance(value, dict | None):
        raise ValueError(f"`model_config.{name}` must be a mapping, such as {own}, got {value!r}.")
    try:
        setattr(config, name, {**own, **value} if isinstance(own, dict) and value is not None else value)
    except Exception as error:  # transformers checks some at once
        raise ValueError(f"`model_config.{name}` = {value!r}: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def resolve_attention(implementation: str, config: PreTrainedConfig, *, flash: bool = False) -> str:
    """Choose and log the attention implementation; ``flash`` is whether flash attention could run.

    ``sdpa`` is replaced by ours, which keeps packed documents apart without a mask, where the model lets it.
    """
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), PreTrainedModel)
    if implementation == "auto":
        implementation = "sdpa" if model_class._supports_sdpa else "eager"
        own = own_type(config.get_text_config(decoder=True))
        flash = flash and (own is None or "flash_attention_2" in own.backends)
        if flash and model_class._supports_flash_attn and importlib.util.find_spec("flash_attn") is not None:
            implementation = "flash_attention_2"
    # Without flash-attn, transformers takes flash attention from the package kernels.
    if implementation.startswith("flash_attention_2") and not any(map(importlib.util.find_spec, _FLASH_PACKAGES)):
        raise ValueError(
            "`attn_implementation: flash_attention_2` needs flash-attn: install the extra `flash`, or use sdpa."
        )
    log.info("Attention of %s: %s.", config.model_type, implementation)
    if implementation == "sdpa" and model_class._supports_attention_backend:
        return register_document_attention()
    return implementation


def _check_keys(overrides: dict[str, Any], config: PreTrainedConfig) -> None:
    for name in overrides:
        if not isinstance(name, str) or not hasattr(config, name):
            hint = did_you_mean(name, config.to_dict())
            raise ValueError(f"`model_config` has '{name}', which {type(config).__name__} does not know. {hint}")


def _load_weights(
    path: str, config: PreTrainedConfig, revision: str | None, settings: dict[str, Any]
) -> PreTrainedModel:
    path = local_or_hub(path, "model")
    check_weight_files(path)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, revision=revision, output_loading_info=True, **settings
        )
    except (ValueError, MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The weights of '{path}' cannot be used: a file {refused_pickle(error)}."
            " Name a model with .safetensors files."
        ) from error
    except Exception as error:  # transformers raises any kind for a wrong config
        if "mismatched" in str(error):
            error = ValueError("tensors have other shapes than its config asks for, see the table above")
        raise ValueError(not_loaded("model", path, error)) from error
    if unused := sorted(report["unexpected_keys"]):
        told = f"'{path}' holds {len(unused)} tensors that its config has no place for ({unused[0]}, ..)"
        log.warning("%s: they are not used.", told)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"The weights of '{path}' lack {len(missing)} tensors ({', '.join(missing[:3])}, ..), which would stay"
            " random: the folder is incomplete or not a causal LM."
        )
    return model
