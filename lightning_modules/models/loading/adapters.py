"""LoRA adapters, fully trained modules, and quantized base models."""

import copy
import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import BitsAndBytesConfig, PreTrainedModel

from lightning_modules.utilities.errors import did_you_mean

if TYPE_CHECKING:  # peft imports bitsandbytes, which takes seconds
    from peft import LoraConfig, PeftModel

EMBEDDINGS_AND_NORMS = "embeddings-and-norms"
"""A value of ``modules_to_save``, like peft's ``target_modules: all-linear``."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations of LoRA (``init_lora_weights``) that change the base model's weights."""

CONFIG_IN_BASE = " with the config in base/, see README.md"
"""End of the base model's name in an export whose base has another config; other readers must not load it by name."""

_CHECKSUM_WORDS = 1 << 22  # words of 8 bytes that share a checksum
_MULTIPLIER = 0x1E3779B97F4A7C15  # any large odd number, which spreads positions over all 64 bits


class AdapterFolder(NamedTuple):
    """A local folder of adapters, and where the weights and the config of their base model are."""

    folder: str
    base: str
    revision: str | None
    config: str


def find_adapters(path: str | None) -> AdapterFolder | None:
    """Return the base model of a folder of adapters; None for anything else, such as a folder with a whole model."""
    folder = Path(path or "").expanduser()
    if path is None or not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return None
    try:
        content = json.loads((folder / "adapter_config.json").read_bytes())
        base = content["base_model_name_or_path"].removesuffix(CONFIG_IN_BASE)
        revision = content.get("revision")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"'{path}' has adapters, but its adapter_config.json does not name their base model ({error!r}): set"
            " `base_model_name_or_path` in it to a hub id or a folder."
        ) from error
    # An export with `adapters: kept` stores the config that the adapters were trained with.
    config = folder / "base" / "config.json"
    config_path = str(config) if config.is_file() else base
    return AdapterFolder(str(folder), base, revision, config_path)


def load_adapters(model: PreTrainedModel, adapters: AdapterFolder, *, with_weights: bool) -> "PeftModel":
    """Add the frozen adapters of a folder to their base model, unmerged; without weights, on the meta device."""
    from peft import PeftConfig, PeftModel, get_peft_model

    folder = adapters.folder
    try:
        config = PeftConfig.from_pretrained(folder)
        config.inference_mode = True
        config.base_model_name_or_path = model.name_or_path
        if with_weights:
            return PeftModel.from_pretrained(model, folder, config=config)
        return get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The adapters in '{folder}' do not fit their base model, according to peft: {reason}"
        ) from error


def add_adapters(model: PreTrainedModel, arguments: dict[str, Any], *, autocast: bool = False) -> "PeftModel":
    """Freeze a model and add adapters, with the arguments of ``peft.LoraConfig``.

    ``modules_to_save: embeddings-and-norms`` also trains the input embedding and all normalizations in full, as in
    LongLoRA (Chen et al., 2024, https://arxiv.org/abs/2309.12307). A head that is tied to a trained embedding stays
    tied (peft's ``ensure_weight_tying``, unless the arguments specify otherwise), and low-rank adapters of either are
    refused. For mixed precision (``autocast``), fully trained weights are float32, like peft's adapters: in bfloat16
    the small updates of fine-tuning would be rounded away.
    """
    from peft import get_peft_model

    for module in model.modules():
        # On CPUs with AVX512, a forward pass in eval mode would make bitsandbytes permanently repack the weight for an
        # operator without a gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    try:
        # Names first: peft ignores those without a match if any other name matches.
        config = lora_config(arguments, model)
        _check_names(model, config)
        adapted = get_peft_model(model, config)
    except (TypeError, NotImplementedError, AttributeError, KeyError, re.error) as error:
        raise ValueError(f"`lora` = {arguments} has a value of the wrong type, according to peft: {error}") from error
    _check_tied(adapted, untie="ensure_weight_tying" in arguments and not config.ensure_weight_tying)
    if autocast:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                # `data`, so that tied parameters stay one object.
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return adapted


def lora_config(arguments: dict[str, Any], model: PreTrainedModel) -> "LoraConfig":
    """Return the config for `add_adapters`; raise a ``ValueError`` or peft's error for wrong arguments."""
    from peft import LoraConfig

    _check_arguments("lora", arguments, LoraConfig.__dataclass_fields__)
    # A copy, because peft appends to its lists, and checkpoints store the arguments to build the same adapters again.
    settings = {"task_type": "CAUSAL_LM", **copy.deepcopy(arguments)}
    if settings.get("modules_to_save") == EMBEDDINGS_AND_NORMS:
        settings["modules_to_save"] = embeddings_and_norms(model)
    elif isinstance(settings.get("modules_to_save"), str):  # peft would treat each letter as a name
        settings["modules_to_save"] = [settings["modules_to_save"]]
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        settings.setdefault("ensure_weight_tying", _touches_embedding(model, settings))
    alpha = settings.get("lora_alpha", 1)
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"`lora.lora_alpha` scales the adapters and must be a number above 0, got {alpha!r}.")
    return LoraConfig(**settings)


def embeddings_and_norms(model: PreTrainedModel) -> list[str]:
    """Return the last components of the names of the input embedding and all normalizations."""
    embedding = model.get_input_embeddings()
    names = set()
    for name, module in model.named_modules():
        if module is embedding or type(module).__name__.endswith("Norm"):
            _, _, last = name.rpartition(".")
            names.add(last)
    return sorted(names)


def quantization_config(arguments: dict[str, Any], *, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the config to quantize a frozen model to 4 or 8 bits (QLoRA, https://arxiv.org/abs/2305.14314).

    Arguments are those of ``transformers.BitsAndBytesConfig``, with ``load_in_4bit`` or ``load_in_8bit``. The defaults
    for 4 bits are those of the paper, NF4 with double quantization, and products in ``compute_dtype``.
    """
    known = [name for name in BitsAndBytesConfig().to_dict() if not name.startswith("_") and name != "quant_method"]
    _check_arguments("quantization", arguments, known)
    if bool(arguments.get("load_in_4bit")) == bool(arguments.get("load_in_8bit")):
        raise ValueError("`quantization` needs either `load_in_4bit: true` or `load_in_8bit: true`.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "`quantization` needs the bitsandbytes package: pip install -c constraints.txt -e '.[quantize]'"
        )
    if not arguments.get("load_in_4bit"):
        return BitsAndBytesConfig(**arguments)
    nf4 = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": compute_dtype,
    }
    return BitsAndBytesConfig(**{**nf4, **arguments})


def is_peft_model(model: nn.Module) -> "TypeGuard[PeftModel]":
    """Return whether a model is a peft model, without importing peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def active_module(module: nn.Module) -> nn.Module:
    """Return a module, or its trained copy if it is in ``modules_to_save``."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.utils.ModulesToSaveWrapper) and not module.disable_adapters:
        return module.modules_to_save[module.active_adapters[0]]
    return module


def changes_base(arguments: Mapping[str, Any]) -> bool:
    """Return whether adapters with these arguments of ``peft.LoraConfig`` change the base model's weights."""
    return str(arguments.get("init_lora_weights", True)).lower().startswith(CHANGES_BASE)


def check_same_scaling(stored: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if adapters were trained with another scaling.

    Other differences change the names or shapes of weights.
    """
    from peft import LoraConfig

    for name in ("lora_alpha", "use_rslora", "alpha_pattern"):
        default = getattr(LoraConfig(), name)
        before = stored.get(name, default)
        now = arguments.get(name, default)
        if before != now:
            raise ValueError(
                f"The checkpoint's adapters were trained with `lora.{name}` = {before}, and this run has {now}: set it"
                " as in the run that wrote the checkpoint."
            )


def trained_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the trained weights of a state dictionary, without those of the frozen base model."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def frozen_fingerprint(module: nn.Module) -> str:
    """Compute a hash of all frozen parameters, which identifies the base model of adapters.

    Quantized weights are left out, because another device may round them differently. Sharded weights are gathered, so
    all processes must call this.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        # Packed quantized weights are integers.
        if not parameter.requires_grad and parameter.is_floating_point():
            # Every rank gathers in the same order.
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(f"{name} {tuple(whole.shape)} {_checksums(whole.detach())}\n".encode())
    return f"all numbers {digest.hexdigest()}"


def _checksums(values: torch.Tensor) -> list[int]:
    """Return checksums modulo 2**64 of the chunks of a tensor: sums of its 8-byte words times position factors.

    Unlike a cryptographic hash, they are computed on the tensor's device, without copying it to main memory.
    """
    data = values.contiguous().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:  # words of 8 bytes need a copy
        data = F.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    # Odd factors: a multiplication by an odd number loses no bit modulo 2**64.
    factors = 2 * _MULTIPLIER * torch.arange(min(_CHECKSUM_WORDS, len(words)), device=values.device) + 1
    # Mix in the highest bits, which a factor alone would not spread.
    checksums = []
    for chunk in words.split(_CHECKSUM_WORDS):
        mixed = chunk ^ (chunk >> 32)
        checksums.append(int((mixed * factors[: len(chunk)]).sum()))
    return checksums


def _check_arguments(option: str, arguments: dict[str, Any], known: Any) -> None:
    for name in arguments:
        if name not in known:
            raise ValueError(f"`{option}` has no '{name}'. {did_you_mean(name, known)}")


def _check_names(model: PreTrainedModel, config: "LoraConfig") -> None:
    """Raise a ``ValueError`` for names without a match, which peft ignores if any other name matches."""
    modules = [f".{name}" for name, _ in model.named_modules() if name]
    for option in ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern"):
        names = getattr(config, option)
        if names is None or isinstance(names, str):
            continue
        for name in names:
            pattern = name if option.endswith("_pattern") else re.escape(name)  # as peft compares them
            if not any(re.match(rf".*\.({pattern})$", module) for module in modules):
                hint = did_you_mean(name, _list_owners(model))
                raise ValueError(f"`lora.{option}` has '{name}', but the model has no such module. {hint}")


def _list_owners(model: PreTrainedModel) -> list[str]:
    """Return the last components of the names of the modules that have parameters of their own."""
    names = set()
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            _, _, last = name.rpartition(".")
            names.add(last)
    return sorted(names)


def _touches_embedding(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    saved = tuple(f".{suffix}" for suffix in settings.get("modules_to_save") or [])
    names = [f".{name}" for name, module in model.named_modules() if module in embeddings]
    return any(name.endswith(saved) for name in names)


def _check_tied(adapted: "PeftModel", *, untie: bool) -> None:
    """Raise a ``ValueError`` if training would untie embedding and head, unless ``untie`` allows it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    base: Any = adapted.get_base_model()
    if not base.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    embedding = base.get_input_embeddings()
    head = base.get_output_embeddings()
    if isinstance(embedding, BaseTunerLayer) or isinstance(head, BaseTunerLayer):
        # peft makes two parameters in the same memory, which are updated twice, and untied when the model is moved.
        raise ValueError(
            "The model's head and embedding are tied, and low-rank adapters would untie them: remove both from"
            " `lora.target_modules`. To train them in full, add the embedding to `lora.modules_to_save`."
        )
    trains_embedding = isinstance(embedding, AuxiliaryTrainingWrapper)
    trains_head = isinstance(head, AuxiliaryTrainingWrapper)
    if trains_embedding != trains_head and not untie:
        part = "embedding" if trains_embedding else "head"
        raise ValueError(
            f"The model's head and embedding are tied, and `lora.modules_to_save` would train the {part} alone, which"
            " peft does not support: remove it."
        )
