"""The weights of a trained model as a plain model of its class has them, one shard at a time."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, and so the memory that an export takes beside the model."""


class Part(NamedTuple):
    """Some tensors of the exported model that are computed when they are written."""

    names: tuple[str, ...]
    size: int
    """Numbers in them."""
    tensors: Callable[[], dict[str, Tensor]]
    """The tensors by name."""


def exported_parts(model: PreTrainedModel | PeftModel, dtype: torch.dtype | None = None) -> list[Part]:
    """All tensors of the model, adapters merged, under the names that a model without adapters has.

    The model itself is left as it is, bit for bit: each layer is merged in a copy of its weight. That is done in
    float32 or wider, and rounded once to the type to be written.

    Args:
        model: A trained model.
        dtype: Of merged weights; None is that of the weight before.

    Raises:
        ValueError: If an adapter is of a kind that cannot be merged.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    adapted = dict(_adapted_modules(base))
    parts = [_adapted_part(path, module, dtype) for path, module in adapted.items()]
    prefixes = tuple(f"{path}." for path in adapted)
    for name, tensor in base.state_dict().items():
        if not name.startswith(prefixes):
            parts.append(_as_it_is({name: tensor}))
    return parts


def _adapted_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that peft has put in the place of those of the model."""
    found = ""
    for path, module in base.named_modules():
        inside = found and path.startswith(f"{found}.")
        if not inside and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found = path
            yield path, module


def _adapted_part(path: str, module: nn.Module, dtype: torch.dtype | None) -> Part:
    if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
        state = module.modules_to_save[module.active_adapters[0]].state_dict()
        return _as_it_is({f"{path}.{name}": tensor for name, tensor in state.items()})
    layer = module.token_adapter if isinstance(module, TrainableTokensWrapper) else module
    if not isinstance(layer, BaseTunerLayer) or isinstance(layer.base_layer, BaseTunerLayer):
        raise ValueError(
            f"The adapter of `{path}` (`{type(module).__name__}`) is of a kind whose merged weights cannot be computed"
            " one layer at a time: set `adapters` to 'kept'."
        )
    own = dict(layer.get_base_layer().named_parameters())
    names = tuple(f"{path}.{name}" for name in own)
    size = sum(map(Tensor.numel, own.values()))
    return Part(names, size, lambda: dict(zip(names, merged_layer(layer, dtype).values(), strict=True)))


def _as_it_is(tensors: dict[str, Tensor]) -> Part:
    return Part(tuple(tensors), sum(map(Tensor.numel, tensors.values())), lambda: tensors)


@torch.no_grad()
def merged_layer(layer: BaseTunerLayer, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weight and bias of a layer with its active adapters in them; the layer is left as it is.

    Args:
        layer: A layer that peft has put around one of the model's.
        dtype: Of the result; None is that of the layer's own.

    Returns:
        New tensors under the layer's names for them.

    Raises:
        ValueError: If peft cannot merge the layer.
    """
    own = dict(layer.get_base_layer().named_parameters())
    data = {name: parameter.data for name, parameter in own.items()}
    merged_before = list(layer.merged_adapters)
    try:
        for name, parameter in own.items():
            wide = torch.promote_types(data[name].dtype, torch.float32)
            parameter.data = data[name].to(wide, copy=True)
        layer.merge()
        return {name: parameter.data.to(dtype or data[name].dtype) for name, parameter in own.items()}
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"peft cannot merge these adapters: {error} Set `adapters` to 'kept'.") from error
    finally:
        for name, parameter in own.items():
            parameter.data = data[name]
        layer.merged_adapters = merged_before


def drop_tied(parts: list[Part], model: PreTrainedModel) -> list[Part] | None:
    """The parts without weights that a reader takes from others, or None if the trained model has untied them.

    Adapters on the head, or a trained copy of it (`modules_to_save`), give it other weights than the embedding.

    Args:
        parts: Of the model.
        model: The model, without the wrapper of peft.
    """
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return parts
    ties: dict[str, str] = model.all_tied_weights_keys
    owner = {name: part for part in parts for name in part.names}
    for target, source in ties.items():
        if not torch.equal(owner[target].tensors()[target], owner[source].tensors()[source]):
            return None
    return [part for part in parts if not ties.keys() & set(part.names)]


def write_weights(shell: PreTrainedModel, parts: list[Part], folder: Path, dtype: torch.dtype | None) -> None:
    """Write config and weights as ``save_pretrained`` does, holding one shard in memory.

    Args:
        shell: A model of the class and config to be saved; its own weights are not looked at.
        parts: The weights.
        folder: Where to.
        dtype: Of the floating-point weights; None leaves them as they are.
    """
    shards = list(_shards(parts, dtype))
    for number, shard in enumerate(shards, start=1):
        tensors = {name: _on_cpu(tensor, dtype) for part in shard for name, tensor in part.tensors().items()}
        # A folder of its own: `save_pretrained` removes shards that it does not know.
        shell.save_pretrained(folder / "shard", state_dict=tensors, max_shard_size=10**18)
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for file in (folder / "shard").iterdir():
            os.replace(file, folder / (name if file.suffix == ".safetensors" else file.name))
    shutil.rmtree(folder / "shard")
    if len(shards) > 1:
        _write_index(folder)


def _on_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _shards(parts: list[Part], dtype: torch.dtype | None) -> Iterator[list[Part]]:
    width = 4 if dtype is None else dtype.itemsize
    shard: list[Part] = []
    filled = 0
    for part in parts:
        if shard and (filled + part.size) * width > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(part)
        filled += part.size
    yield shard


def _write_index(folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), file.name)
    total = sum(file.stat().st_size for file in folder.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
