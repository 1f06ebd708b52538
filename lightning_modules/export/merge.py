"""A copy of a trained model in main memory, with merged adapters."""

import copy
import warnings

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel


def merged_copy(model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of a model on the CPU with its adapters merged; the model itself does not change.

    Each adapted layer is merged in float32 or wider, and rounded once to ``dtype``, like all other weights.

    Raises:
        ValueError: If peft cannot merge the adapters.
    """
    copied = _copy_to_cpu(model, None if isinstance(model, PeftModel) else dtype)
    if isinstance(copied, PeftModel):
        adapted: dict[nn.Module, list[BaseTunerLayer]] = {}  # several adapters may be of one module of experts
        for layer in copied.modules():
            if isinstance(layer, BaseTunerLayer):
                adapted.setdefault(layer.get_base_layer(), []).append(layer)
        for base, layers in adapted.items():
            for layer in layers:
                merge_layer(layer)
            base.to(dtype)  # now, because all layers in float32 could need twice the memory of the model
        # This removes the adapters. peft warns that they are merged already.
        with warnings.catch_warnings(action="ignore"):
            copied = copied.merge_and_unload()
    copied = copied.to(dtype)
    _tie_equal_weights(copied)
    return copied


@torch.no_grad()
def merge_layer(layer: BaseTunerLayer) -> None:
    """Merge the active adapters of a layer into new parameters of its base layer, in float32 or wider."""
    base = layer.get_base_layer()
    for name, parameter in list(base.named_parameters(recurse=False)):
        # A copy, because the parameter may be tied to that of another layer.
        wide = parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        setattr(base, name, nn.Parameter(wide, requires_grad=False))
    try:
        layer.merge()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"peft cannot merge these adapters: {error} Set `adapters` to 'kept'.") from error


def _copy_to_cpu(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None) -> PreTrainedModel | PeftModel:
    """Return a copy of a model with all tensors in main memory: a copy on the model's device might not fit.

    Parameters are converted to ``dtype`` unless it is None.
    """
    copies: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        copied = parameter.detach().to("cpu", dtype or parameter.dtype, copy=True)
        copies[id(parameter)] = nn.Parameter(copied, requires_grad=False)
    for buffer in model.buffers():
        if not buffer.is_meta:  # as those that are not saved may be
            copies[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, copies)


def _tie_equal_weights(model: PreTrainedModel) -> None:
    """Tie the weights that were tied before training, or set the config if training has made them different.

    Adapters on the head, or a trained copy of it (`modules_to_save`), make it different from the embedding.
    """
    ties: dict[str, str] = model.all_tied_weights_keys
    if not ties:
        return
    weights = model.state_dict()
    is_tied = all(torch.equal(weights[target], weights[source]) for target, source in ties.items())
    model.config.tie_word_embeddings = is_tied
    model.config.get_text_config(decoder=True).tie_word_embeddings = is_tied
    if is_tied:
        model.tie_weights()
