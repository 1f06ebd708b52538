"""Sizes in a model's config, compared with its weight files before anything of such a size is built."""

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig

MAX_LAYERS = 10_000
"""Layers of a config without local weight files; the deepest models have a few hundred."""

_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers"})
"""Names of the number of layers. Each layer has at least one tensor of its own."""

_SIZES = ("layer", "head", "expert", "hidden", "vocab", "intermediate", "embd", "d_model", "ffn", "inner")
"""Parts of the names of sizes. Each is at most a dimension of some tensor."""

_PACKED = 32
"""Weights of one bit in numbers of four bytes: the most by which quantization makes a dimension smaller."""

_SLACK = 4
"""Parameters of a model for each one in its files, at most: tied embeddings are stored once, and some buffers not."""


MAX_BUFFERS = 2**30
"""Numbers in a model's tables of positions."""

_MAX_SEQ_LEN = 2**27
"""Largest ``max_seq_len``, of which MPT makes a table in each pass."""


def check_stored_sizes(model: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise a ``ValueError`` for sizes in a ``config.json`` that the weight files of its folder cannot have.

    Some classes of configs make a list as long as a size, so it is checked before one is made.

    Args:
        model: Folder, ``config.json`` or hub id of the model; only a local folder has files to compare with.
        revision: Revision on the hub.
        overrides: Values that replace those of the config.
    """
    try:
        values, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    except Exception:
        return
    check_sizes_of({**values, **(overrides or {})}, model)


def check_sizes_of(values: Mapping[str, Any], folder: str = "") -> None:
    """Check the values of a config like `check_stored_sizes`."""
    shapes = _read_shapes(folder)
    most = max((size for shape in shapes for size in shape), default=0)
    for name, value in _numbers(values):
        limit = math.inf
        if name in _LAYERS:
            limit = len(shapes) if shapes else MAX_LAYERS
        elif shapes and any(part in name for part in _SIZES):
            limit = _PACKED * max(most, len(shapes))
        elif name == "max_seq_len":
            limit = _MAX_SEQ_LEN
        if value > limit:
            found = f"{len(shapes)} tensors of at most {most:,} rows or columns" if shapes else "no weight files here"
            raise ValueError(
                f"`{name}` = {value:,} in the config of the model '{folder}' is larger than that model can be"
                f" ({found}): correct it, or fetch the model again."
            )


def check_parameters(config: PreTrainedConfig, folder: str) -> None:
    """Raise a ``ValueError`` if a config describes a far larger model than the weight files of its folder have.

    The model is built without memory for its weights. Quantized models, whose files have fewer numbers, and models
    that are not part of transformers are not checked.
    """
    stored = sum(math.prod(shape) for shape in _read_shapes(folder))
    quantized = getattr(config, "quantization_config", None) is not None
    if not stored or quantized or type(config) not in AutoModelForCausalLM._model_mapping:
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        described = sum(weight.numel() for weight in model.parameters())
        # Tables of positions, which are not in files.
        buffers = sum(buffer.numel() for buffer in model.buffers())
    except RuntimeError:  # sizes beyond 64 bits
        described = buffers = 2**63
    except Exception:  # any kind, for a wrong value, which is reported where the model is loaded
        return
    if described > _SLACK * stored:
        raise ValueError(
            f"The config of '{folder}' describes a model of {described:,} parameters, but its weight files have"
            f" {stored:,}: correct config.json, or give a local folder or another hub id."
        )
    if buffers > max(MAX_BUFFERS, _SLACK * stored):
        raise ValueError(
            f"The config of '{folder}' describes a model with tables of {buffers:,} numbers, such as a"
            f" mask of positions ({MAX_BUFFERS:,} at most): correct the number of positions in config.json."
        )


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of all numbers in a config and the configs in it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield str(name), value


def _read_shapes(folder: str) -> list[tuple[int, ...]]:
    """Return the shapes of all tensors in a local folder, without reading them; none if they cannot be told."""
    path = Path(folder).expanduser()
    shapes: list[tuple[int, ...]] = []
    if (path / "adapter_config.json").is_file():  # its files have the adapters only
        return shapes
    try:
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                shapes += [tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
        if not shapes:
            for file in sorted(path.glob("pytorch_model*.bin")):
                content = torch.load(file, map_location="meta", mmap=True, weights_only=True)
                shapes += [tuple(tensor.shape) for tensor in content.values() if isinstance(tensor, torch.Tensor)]
    except (SafetensorError, OSError, RuntimeError, ValueError, AttributeError, EOFError, UnpicklingError):
        return []  # damaged, of an old format, or more than weights, which is reported where they are loaded
    return shapes
