"""LoRA adapters, weights trained in full beside them, and a quantized model below them."""

import copy
import hashlib
import importlib.util
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedModel

from lightning_modules.utilities.errors import did_you_mean

if TYPE_CHECKING:  # imported where it is used: peft imports bitsandbytes, and takes seconds
    from peft import LoraConfig, PeftModel

EMBEDDINGS_AND_NORMS = "embeddings-and-norms"
"""A value of ``modules_to_save``, in the manner of peft's ``target_modules: all-linear``."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starting values of LoRA (``init_lora_weights``) that take something out of the base model's weights."""


_ALL_NUMBERS = "all numbers "  # before fingerprints, unlike those of earlier versions
_CHUNK = 1 << 22  # words of 8 bytes that share a checksum
_FACTOR = 0x1E3779B97F4A7C15  # any large odd number: it spreads the places over all 64 bits

_log = logging.getLogger(__name__)


def add_adapters(model: PreTrainedModel, arguments: dict[str, Any], *, autocast: bool = False) -> "PeftModel":
    """Freeze a model and add adapters, by the arguments of ``peft.LoraConfig``.

    ``modules_to_save: embeddings-and-norms`` also trains the input embedding and all normalizations in full, as
    LongLoRA does (Chen et al., 2024, https://arxiv.org/abs/2309.12307). A head tied to an embedding that is trained
    stays tied (peft's ``ensure_weight_tying``, unless the arguments specify otherwise); low-rank adapters of either are
    refused there. For mixed precision (``autocast``), weights trained in full are held in float32, as peft holds
    adapters: in bfloat16 the small steps of fine-tuning round to nothing.

    Raises:
        ValueError: If an argument or a module name is unknown, nothing would be trained, or a tied head would be
            separated from its embedding.
    """
    from peft import get_peft_model

    for module in model.modules():
        # On CPUs with AVX512 a pass in eval mode would make bitsandbytes repack the weight for good, for an operator
        # that has no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    try:
        config = lora_config(arguments, model)
        _check_names(model, config)
        adapted = get_peft_model(model, config)
    except (TypeError, NotImplementedError, AttributeError, KeyError, re.error) as error:
        raise ValueError(f"`lora` = {arguments} has a value of a wrong type, according to peft: {error}") from error
    if not any(parameter.requires_grad for parameter in adapted.parameters()):
        raise ValueError(f"`lora` = {arguments} leaves nothing to train: remove `inference_mode`.")
    _check_tied(adapted, apart="ensure_weight_tying" in arguments and not config.ensure_weight_tying)
    if autocast:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return adapted


def lora_config(arguments: dict[str, Any], model: PreTrainedModel) -> "LoraConfig":
    """Return the config of `add_adapters`; a ``ValueError`` or peft's error if an argument is unknown or wrong."""
    from peft import LoraConfig

    _check_arguments("lora", arguments, LoraConfig.__dataclass_fields__)
    # A copy: peft adds to the lists in it, and the arguments go into checkpoints, to build the same adapters again.
    settings = {"task_type": "CAUSAL_LM", **copy.deepcopy(arguments)}
    if isinstance(settings.get("modules_to_save"), str) and settings["modules_to_save"] != EMBEDDINGS_AND_NORMS:
        raise ValueError(
            f"`lora.modules_to_save` must be a list of names or '{EMBEDDINGS_AND_NORMS}', got"
            f" '{settings['modules_to_save']}', of which peft would take each letter for a name: put it into brackets."
        )
    if settings.get("modules_to_save") == EMBEDDINGS_AND_NORMS:
        settings["modules_to_save"] = embeddings_and_norms(model)
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        settings.setdefault("ensure_weight_tying", _touches_embedding(model, settings))
    alpha = settings.get("lora_alpha", 1)
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"`lora.lora_alpha` scales the adapters and must be a number above 0, got {alpha!r}.")
    return LoraConfig(**settings)


def embeddings_and_norms(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of the input embedding and of all normalizations."""
    embedding = model.get_input_embeddings()
    named = model.named_modules()
    chosen = [name for name, part in named if part is embedding or type(part).__name__.endswith("Norm")]
    return sorted({name.rpartition(".")[2] for name in chosen})


def quantization_config(arguments: dict[str, Any], *, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return how the weights of a frozen model are held in 4 or 8 bits (QLoRA, https://arxiv.org/abs/2305.14314).

    Arguments are those of ``transformers.BitsAndBytesConfig``, with ``load_in_4bit`` or ``load_in_8bit``. Four bits
    default to NF4 with quantized constants, as in the paper, and to products in ``compute_dtype``.

    Raises:
        ValueError: If bitsandbytes is missing, an argument is unknown, or neither or both numbers of bits are given.
    """
    known = [name for name in BitsAndBytesConfig().to_dict() if not name.startswith("_") and name != "quant_method"]
    _check_arguments("quantization", arguments, known)
    if bool(arguments.get("load_in_4bit")) == bool(arguments.get("load_in_8bit")):
        raise ValueError("`quantization` must say either `load_in_4bit: true` or `load_in_8bit: true`.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "`quantization` needs the package bitsandbytes: pip install -c constraints.txt -e '.[quantize]'"
        )
    nf4 = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": compute_dtype,
    }
    return BitsAndBytesConfig(**({**nf4, **arguments} if arguments.get("load_in_4bit") else arguments))


def is_peft_model(model: nn.Module) -> "TypeGuard[PeftModel]":
    """Return whether peft made this model, without importing it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def active_module(module: nn.Module) -> nn.Module:
    """Return the module that computes: the trained copy of a module that is trained in full beside adapters."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.utils.ModulesToSaveWrapper) and not module.disable_adapters:
        return module.modules_to_save[module.active_adapters[0]]
    return module


def changes_base(arguments: Mapping[str, Any]) -> bool:
    """Return whether adapters of these arguments of ``peft.LoraConfig`` first change the weights below them."""
    return str(arguments.get("init_lora_weights", True)).lower().startswith(CHANGES_BASE)


def check_same_scaling(stored: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if the arguments scale adapters otherwise than those they were trained with.

    Other differences show in names and shapes of the weights.
    """
    from peft import LoraConfig

    for name in ("lora_alpha", "use_rslora", "alpha_pattern"):
        before, now = (settings.get(name, getattr(LoraConfig(), name)) for settings in (stored, arguments))
        if before != now:
            raise ValueError(
                f"The checkpoint's adapters were trained with `lora.{name}` = {before}, and this run has {now}: give"
                " the `lora` of the run that wrote it."
            )


def trained_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the trained part of a state dictionary; the rest is that of a model that is stored elsewhere."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def frozen_fingerprint(module: nn.Module) -> str:
    """Compute a hash of all frozen parameters, which identifies the model below adapters.

    Quantized weights are left out: another device may round them differently. Sharded ones are gathered, so that all
    processes must call this.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(f"{name} {tuple(whole.shape)} {_checksums(whole.detach())}\n".encode())
    return f"{_ALL_NUMBERS}{digest.hexdigest()}"


def same_frozen(stored: str | None, own: str | None) -> bool:
    """Return whether two results of `frozen_fingerprint` are of the same weights; those of old versions always are."""
    if stored is not None and not stored.startswith(_ALL_NUMBERS):
        _log.warning("The checkpoint is of an earlier version: the weights below its adapters are not compared.")
        return True
    return stored in (None, own)


def _checksums(values: torch.Tensor) -> list[int]:
    """Sum the bytes of a tensor chunk by chunk modulo 2**64, each 8 of them times a factor that their place decides.

    Unlike a cryptographic hash it is computed where the tensor is: large models need not be copied to main memory.
    """
    data = values.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:  # words of 8 bytes need a copy
        data = F.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    factors = 2 * _FACTOR * torch.arange(min(_CHUNK, len(words)), device=values.device) + 1
    # The shift brings the highest bits to where a factor spreads them.
    chunks = (chunk ^ (chunk >> 32) for chunk in words.split(_CHUNK))
    return [int((chunk * factors[: len(chunk)]).sum()) for chunk in chunks]


def _check_arguments(option: str, arguments: dict[str, Any], known: Any) -> None:
    for name in arguments:
        if name not in known:
            raise ValueError(f"`{option}` has no '{name}'. {did_you_mean(name, known)}")


def _check_names(model: PreTrainedModel, config: "LoraConfig") -> None:
    """Raise a ``ValueError`` for names that match nothing: peft ignores them as long as any other matches."""
    modules = [f".{name}" for name, _ in model.named_modules() if name]
    for option in ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern"):
        names = getattr(config, option)
        for name in [] if names is None or isinstance(names, str) else names:
            pattern = name if option.endswith("_pattern") else re.escape(name)  # as peft compares them
            if not any(re.match(rf".*\.({pattern})$", module) for module in modules):
                owners = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
                hint = did_you_mean(name, sorted({name.rpartition(".")[2] for name in owners}))
                raise ValueError(f"`lora.{option}` names '{name}', and the model has no such module. {hint}")
    layers, wanted = model.config.get_text_config(decoder=True).num_hidden_layers, config.layers_to_transform
    for layer in [wanted] if isinstance(wanted, int) else wanted or []:
        if not 0 <= layer < layers:
            raise ValueError(f"`lora.layers_to_transform` names layer {layer}: the model has 0 to {layers - 1}.")


def _touches_embedding(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    own = [name for name, module in model.named_modules() if module in embeddings]
    whole = settings.get("modules_to_save") or []
    return any(f".{name}".endswith(f".{part}") for name in own for part in whole)


def _check_tied(adapted: "PeftModel", *, apart: bool) -> None:
    """Raise a ``ValueError`` if an embedding and its tied head would be separated, unless ``apart`` allows it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    base: Any = adapted.get_base_model()
    if not base.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    parts = (base.get_input_embeddings(), base.get_output_embeddings())
    if any(isinstance(part, BaseTunerLayer) for part in parts):
        # peft gives each its own parameter in the same memory: stepped twice, and separated once the model is moved.
        raise ValueError(
            "The model's head is its embedding, and with low-rank adapters they would not stay one: leave both out of"
            " `lora.target_modules`. To train them in full, name the embedding in `lora.modules_to_save`."
        )
    embedding, head = (isinstance(part, AuxiliaryTrainingWrapper) for part in parts)
    if embedding != head and not apart:
        raise ValueError(
            f"The model's head is its embedding, and `lora.modules_to_save` would train the"
            f" {'embedding' if embedding else 'head'} alone: peft cannot keep these two one. Leave it out."
        )
