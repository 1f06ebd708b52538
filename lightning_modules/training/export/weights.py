"""The weights of a trained model as a plain model of its class has them, adapters merged."""

import copy
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel


def merged_weights(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights on the CPU under the names that a model without adapters has.

    The model itself is left as it is, bit for bit: each layer is merged in a copy of its weight. That is done in
    float32 or wider, and rounded once to ``dtype``.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = dict(_adapted_modules(base))
    prefixes = tuple(f"{path}." for path in adapted)
    weights = {name: _to_cpu(part, dtype) for name, part in base.state_dict().items() if not name.startswith(prefixes)}
    for path, module in adapted.items():
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            parts = module.modules_to_save[module.active_adapters[0]].state_dict()
        else:
            parts = merged_layer(_tuner_layer(path, module), dtype)
        weights |= {f"{path}.{name}": _to_cpu(part, dtype) for name, part in parts.items()}
    return weights


def check_mergeable(model: PreTrainedModel | PeftModel) -> None:
    """Raise a ``ValueError`` if an adapter is of a kind that cannot be merged one layer at a time."""
    if isinstance(model, PeftModel):
        for path, module in _adapted_modules(model.get_base_model()):
            if not isinstance(module, ModulesToSaveWrapper):
                _tuner_layer(path, module)


@torch.no_grad()
def merged_layer(layer: BaseTunerLayer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weight and bias of a layer with its active adapters in them; the layer is left as it is."""
    layer = copy.deepcopy(layer)
    own = dict(layer.get_base_layer().named_parameters())
    for parameter in own.values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    try:
        layer.merge()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"peft cannot merge these adapters: {error} Set `adapters` to 'kept'.") from error
    return {name: parameter.data.to(dtype) for name, parameter in own.items()}


def drop_tied(weights: dict[str, Tensor], model: PreTrainedModel) -> bool:
    """Remove the weights that a reader takes from others; return whether the trained model has untied them.

    Adapters on the head, or a trained copy of it (`modules_to_save`), give it other weights than the embedding.
    """
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return False
    ties: dict[str, str] = model.all_tied_weights_keys
    if not all(torch.equal(weights[target], weights[source]) for target, source in ties.items()):
        return True
    for target in ties:
        del weights[target]
    return False


def _adapted_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that peft has put in the place of those of the model."""
    found = ""
    for path, module in base.named_modules():
        inside = found and path.startswith(f"{found}.")
        if not inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found = path
            yield path, module


def _tuner_layer(path: str, module: nn.Module) -> BaseTunerLayer:
    layer = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
    if not isinstance(layer, BaseTunerLayer) or isinstance(layer.base_layer, BaseTunerLayer):
        raise ValueError(
            f"The adapter of `{path}` (`{type(module).__name__}`) is of a kind whose merged weights cannot be computed"
            " one layer at a time: set `adapters` to 'kept'."
        )
    return layer


def _to_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
