"""LoRA adapters, weights trained in full beside them, and a quantised model below them."""

import difflib
import hashlib
import importlib.util
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel

EMBEDDINGS_AND_NORMS = "embeddings-and-norms"
"""A value of ``modules_to_save``, in the manner of peft's ``target_modules: all-linear``."""


def add_adapters(model: PreTrainedModel, arguments: dict[str, Any], *, autocast: bool = False) -> PeftModel:
    """Freeze a model and put adapters into it.

    Where a model's head is its embedding, and the embedding is trained or adapted, the two stay one (peft's
    ``ensure_weight_tying``, unless the arguments say otherwise).

    Args:
        model: A causal LM.
        arguments: Of ``peft.LoraConfig``. ``modules_to_save: embeddings-and-norms`` trains the input embedding and all
            normalisations in full besides, as LongLoRA does (Chen et al., 2024, https://arxiv.org/abs/2309.12307),
            which found that low-rank updates alone do not extend a context well.
        autocast: Whether the model will run in mixed precision. What is trained in full is then held in float32, as
            peft holds adapters: in bfloat16 the small steps of fine-tuning round to nothing.

    Raises:
        ValueError: If ``peft.LoraConfig`` knows one of the arguments not, or a name is that of no module.
    """
    config = lora_config(arguments, model)
    _check_names(model, config)
    for module in model.modules():
        # On CPUs with AVX512 a pass in eval mode would make bitsandbytes repack the weight for good, for an operator
        # that has no gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    adapted = get_peft_model(model, config)
    if autocast:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return adapted


def lora_config(arguments: dict[str, Any], model: PreTrainedModel) -> LoraConfig:
    """What the adapters of `add_adapters` are made by.

    Raises:
        ValueError: If ``peft.LoraConfig`` knows one of the arguments not.
    """
    _check_arguments("lora", arguments, LoraConfig.__dataclass_fields__)
    settings = {"task_type": "CAUSAL_LM", **arguments}
    if settings.get("modules_to_save") == EMBEDDINGS_AND_NORMS:
        settings["modules_to_save"] = embeddings_and_norms(model)
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        settings.setdefault("ensure_weight_tying", _touches_embedding(model, settings))
    return LoraConfig(**settings)


def embeddings_and_norms(model: PreTrainedModel) -> list[str]:
    """Names of the input embedding and of all normalisations, as ``modules_to_save`` wants them: their last parts."""
    embedding = model.get_input_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if module is embedding or type(module).__name__.endswith("Norm")
        }
    )


def quantization_config(arguments: dict[str, Any], *, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """How the weights of a frozen model are held in 4 or 8 bits (QLoRA, https://arxiv.org/abs/2305.14314).

    Args:
        arguments: Of ``transformers.BitsAndBytesConfig``, with ``load_in_4bit`` or ``load_in_8bit``. Four bits are NF4
            with quantised constants, as in the paper, unless they say otherwise.
        compute_dtype: Of the products with 4-bit weights, unless the arguments say otherwise.

    Raises:
        ValueError: If bitsandbytes is missing, an argument is unknown, or neither or both numbers of bits are given.
    """
    _check_arguments("quantization", arguments, _bitsandbytes_arguments())
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


def active_module(module: nn.Module) -> nn.Module:
    """What computes: of a module that is trained in full beside adapters the trained copy."""
    if isinstance(module, ModulesToSaveWrapper) and not module.disable_adapters:
        return module.modules_to_save[module.active_adapters[0]]
    return module


def trained_state(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Of a state dictionary what is trained; the rest is that of a model which is stored elsewhere."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def frozen_fingerprint(module: nn.Module, numbers: int = 64) -> str:
    """A hash of the first numbers of each frozen parameter, by which a model is known again.

    Quantised weights are left out: another device may round them otherwise. Divided ones are gathered, so that all
    processes must call this.

    Args:
        module: What holds the parameters.
        numbers: How many of each.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            head = whole.detach().flatten()[:numbers].to("cpu", torch.float32)
            digest.update(name.encode() + head.numpy().tobytes())
    return digest.hexdigest()


def _check_arguments(option: str, arguments: dict[str, Any], known: Any) -> None:
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"`{option}` has no '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))


def _bitsandbytes_arguments() -> list[str]:
    return [name for name in BitsAndBytesConfig().to_dict() if not name.startswith("_") and name != "quant_method"]


def _check_names(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise a ``ValueError`` for names that fit nothing: peft passes over them as long as any other fits."""
    modules = [f".{name}" for name, _ in model.named_modules() if name]
    for option, start in (("target_modules", "."), ("modules_to_save", "")):  # as peft compares them
        names = getattr(config, option)
        for name in [] if names is None or isinstance(names, str) else names:
            if not any(module.endswith(f"{start}{name}") for module in modules):
                known = _leaves(model)
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean '{near[0]}'?" if near else f"It has {', '.join(known)}."
                raise ValueError(f"`lora.{option}` names '{name}', and the model has no such module. {hint}")


def _leaves(model: nn.Module) -> list[str]:
    """Last parts of the names of modules that have parameters of their own."""
    owners = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
    return sorted({name.rpartition(".")[2] for name in owners})


def _touches_embedding(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {name.rpartition(".")[2] for name, module in model.named_modules() if module in embeddings}
    named = [settings.get("target_modules"), settings.get("modules_to_save")]
    return any(own & set(names) for names in named if isinstance(names, list | tuple | set))
