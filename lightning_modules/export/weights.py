"""Weights of a trained model with merged adapters, under the names of a model without adapters."""

import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel


def merged_weights(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights on the CPU, under the names of a model without adapters.

    The model itself does not change: each layer is merged in a copy of its weight, in float32 or wider, and rounded
    once to ``dtype``.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = dict(_find_adapted_modules(base))
    prefixes = tuple(f"{path}." for path in adapted)
    plain = ((name, value) for name, value in base.state_dict().items() if not name.startswith(prefixes))
    weights = {name: _to_cpu(value, dtype) for name, value in plain}
    for path, module in adapted.items():
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            state = module.modules_to_save[module.active_adapters[0]].state_dict()
        else:
            state = merge_layer(_find_tuner_layer(path, module), dtype)
        weights |= {f"{path}.{name}": _to_cpu(value, dtype) for name, value in state.items()}
    return weights


def check_mergeable(model: PreTrainedModel | PeftModel) -> None:
    """Raise a ``ValueError`` for adapters that cannot be merged layer by layer."""
    if isinstance(model, PeftModel):
        for path, module in _find_adapted_modules(model.get_base_model()):
            if not isinstance(module, ModulesToSaveWrapper):
                _find_tuner_layer(path, module)


@torch.no_grad()
def merge_layer(layer: BaseTunerLayer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weight and bias of a layer with its active adapters merged; the layer itself does not change."""
    layer = copy.deepcopy(layer)
    merged = dict(layer.get_base_layer().named_parameters())
    for parameter in merged.values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    try:
        layer.merge()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"peft cannot merge these adapters: {error} Set `adapters` to 'kept'.") from error
    return {name: parameter.data.to(dtype) for name, parameter in merged.items()}


def drop_tied(weights: dict[str, Tensor], model: PreTrainedModel) -> bool:
    """Remove weights that are tied to others; return whether training has untied them.

    Adapters on the head, or a trained copy of it (`modules_to_save`), make it different from the embedding.
    """
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return False
    ties: dict[str, str] = model.all_tied_weights_keys
    if not all(torch.equal(weights[target], weights[source]) for target, source in ties.items()):
        return True
    for target in ties:
        del weights[target]
    return False


def _find_adapted_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that peft has replaced."""
    outer = ""
    for path, module in base.named_modules():
        inside = outer and path.startswith(f"{outer}.")
        if not inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            outer = path
            yield path, module


def _find_tuner_layer(path: str, module: nn.Module) -> BaseTunerLayer:
    layer = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
    if not isinstance(layer, BaseTunerLayer) or isinstance(layer.base_layer, BaseTunerLayer):
        raise ValueError(
            f"The adapter of `{path}` (`{type(module).__name__}`) cannot be merged layer by layer: set `adapters` to"
            " 'kept'."
        )
    return layer


def _to_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
