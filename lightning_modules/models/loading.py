"""Load a causal LM from a hub id, a local folder or a bare config."""

import contextlib
import difflib
import importlib.util
import logging
import pickle
from typing import Any, Literal, TypeGuard

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from lightning_modules.functional.head_kernels import HeadKernel, check_installed
from lightning_modules.models.adapters import add_adapters, quantization_config
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.checks import check_config, check_sizes, check_weight_files
from lightning_modules.models.context_extension.methods import ContextExtension, extend_config
from lightning_modules.models.context_extension.rope_types import own_type
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.optimizations.gradient_checkpointing import Checkpointing, enable_checkpointing
from lightning_modules.models.tokenization.tokenizer import local_or_hub, not_loaded
from lightning_modules.utilities.pickles import refused_pickle

log = logging.getLogger(__name__)

_FLASH_PACKAGES = ("flash_attn", "kernels")

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
"""Of the weights; ``auto`` keeps the stored one."""


def load_backbone(
    pretrained_model_name_or_path: str | None = None,
    *,
    model_config: dict[str, Any] | None = None,
    context_extension: dict[str, Any] | ContextExtension | None = None,
    revision: str | None = None,
    dtype: DType = "auto",
    attn_implementation: str = "auto",
    gradient_checkpointing: Checkpointing = False,
    lora: dict[str, Any] | None = None,
    quantization: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    autocast: bool = False,
    head_kernel: HeadKernel = "chunked",
    with_weights: bool = True,
) -> Backbone:
    """Load a causal LM into main memory, ready to be moved, and then scored or trained.

    Args:
        pretrained_model_name_or_path: A hub id or a local folder with weights; a ``config.json`` file, or None with a
            `model_config` that names a ``model_type``, for random weights.
        model_config: Values that replace those of the model's config; dictionaries in it (``rope_parameters``) are
            merged key by key.
        context_extension: How the model's context is extended: a `ContextExtension` or its arguments.
        revision: Branch, tag or commit on the hub.
        dtype: Of the weights.
        attn_implementation: As in transformers; ``auto`` is ``flash_attention_2`` where it is installed and the model
            runs on a GPU in half precision, else torch's scaled dot product attention.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass; with ``selective`` all but
            the outputs of attention.
        lora: Arguments of `add_adapters`; the other weights are frozen.
        quantization: Arguments of `quantization_config`: the frozen weights are held in 4 or 8 bits.
        trust_remote_code: Run code from the model's repository; off unless you trust it.
        device: Where the model will run, which decides its attention.
        autocast: Whether it will run under half-precision autocast, which decides it, too.
        head_kernel: What computes the loss from hidden states in training.
        with_weights: If not, all tensors are on the meta device, where they have a shape and no memory, for somebody
            who will fill them in.

    Raises:
        ValueError: If the model cannot be found, built or extended, or lacks weights, or the head kernel's package is
            missing.
    """
    check_installed(head_kernel)
    config = load_config(
        pretrained_model_name_or_path,
        model_config=model_config,
        context_extension=context_extension,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    weights_dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    half = autocast or weights_dtype in (torch.bfloat16, torch.float16)
    flash = half and torch.device(device).type == "cuda"
    settings: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else weights_dtype,
        "attn_implementation": resolve_attention(attn_implementation, config, flash=flash),
        "trust_remote_code": trust_remote_code,
    }
    if quantization is not None:
        check_quantization(pretrained_model_name_or_path, config)
        compute_dtype = torch.bfloat16 if autocast else weights_dtype
        settings["quantization_config"] = quantization_config(quantization, compute_dtype=compute_dtype)
        settings["device_map"] = {"": torch.device(device)}  # or transformers takes the first GPU
    with contextlib.nullcontext() if with_weights else torch.device("meta"):
        if with_weights and has_weights(pretrained_model_name_or_path):
            model = _load_weights(pretrained_model_name_or_path, config, revision, settings)
        else:
            model = AutoModelForCausalLM.from_config(config, **{**settings, "dtype": weights_dtype})
        if with_weights:
            check_rotary(model)
        enable_checkpointing(model, gradient_checkpointing)
        if lora is not None:
            model = add_adapters(model, lora, autocast=autocast)
    return Backbone(model, head_kernel)


def has_weights(pretrained_model_name_or_path: str | None) -> TypeGuard[str]:
    """Whether a model has stored weights; one that is only described by its config gets random ones."""
    return pretrained_model_name_or_path is not None and not pretrained_model_name_or_path.endswith(".json")


def check_quantization(pretrained_model_name_or_path: str | None, config: PreTrainedConfig) -> None:
    """Raise a ``ValueError`` if there are no weights to quantise, or they are quantised already."""
    if not has_weights(pretrained_model_name_or_path):
        raise ValueError("`quantization` needs stored weights: name a hub id or a folder, or leave it out.")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"'{pretrained_model_name_or_path}' is stored with quantised weights: leave `quantization` out."
        )


def load_config(
    pretrained_model_name_or_path: str | None,
    *,
    model_config: dict[str, Any] | None = None,
    context_extension: dict[str, Any] | ContextExtension | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedConfig:
    """The model's config with the values of `model_config` in place, then extended, checked by transformers.

    Raises:
        ValueError: If it cannot be found or extended, or neither a path nor a ``model_type`` is given.
    """
    overrides = dict(model_config or {})
    check_sizes(overrides)  # some configs make a list of as many values
    if pretrained_model_name_or_path is None:
        if "model_type" not in overrides:
            raise ValueError(
                "Name a model by `pretrained_model_name_or_path`, or by the `model_type` of a `model_config`."
            )
        config = _new_config(overrides)
    else:
        pretrained_model_name_or_path = local_or_hub(pretrained_model_name_or_path, "model")
        try:
            stored, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, revision=revision)
        except Exception:  # of which the next lines tell
            stored = {}
        check_sizes(stored)
        try:
            config = AutoConfig.from_pretrained(
                pretrained_model_name_or_path, revision=revision, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # of values of a wrong kind transformers raises whatever it stumbles over
            raise ValueError(not_loaded("model", pretrained_model_name_or_path, error)) from error
        _check_keys(overrides, config)
        for name, value in overrides.items():
            _override(config, name, value)
    check_config(config, trust_remote_code=trust_remote_code)
    extend_config(config, context_extension)
    try:
        config.validate()
    except Exception as error:
        raise ValueError(f"`model_config` = {overrides} makes no model: {_in_one_line(error)}") from error
    return config


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
    """Choose and log the attention implementation; ``flash`` says whether flash attention could run.

    ``sdpa`` is replaced by ours, which keeps packed documents apart without a mask, where the model lets it.
    """
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), PreTrainedModel)
    if implementation == "auto":
        implementation = "sdpa" if model_class._supports_sdpa else "eager"
        own = own_type(config.get_text_config(decoder=True))
        flash = flash and (own is None or "flash_attention_2" in own.backends)
        if flash and model_class._supports_flash_attn and importlib.util.find_spec("flash_attn") is not None:
            implementation = "flash_attention_2"
    # transformers takes flash attention from the package kernels if there is no flash-attn.
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
            near = difflib.get_close_matches(str(name), config.to_dict(), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"`model_config` has '{name}', which {type(config).__name__} does not know.{hint}")


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
    except Exception as error:  # of a wrong config transformers raises whatever it stumbles over
        if "mismatched" in str(error):
            error = ValueError("tensors have other shapes than its config asks for, see the table above")
        raise ValueError(not_loaded("model", path, error)) from error
    if unused := sorted(report["unexpected_keys"]):
        log.warning(
            "'%s' holds %d tensors that its config has no place for (%s, ..): they are not used.",
            path,
            len(unused),
            unused[0],
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"The weights of '{path}' lack {len(missing)} tensors ({', '.join(missing[:3])}, ..), which would stay"
            " random: the folder is incomplete or is no causal LM."
        )
    return model
