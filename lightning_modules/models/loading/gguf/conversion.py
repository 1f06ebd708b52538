"""Models in the GGUF files of llama.cpp: each is converted once, into a folder that transformers loads."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lightning_modules.models.loading.config import is_gguf, local_or_hub
from lightning_modules.models.loading.gguf.architectures import ARCHITECTURES, original_values, read_config
from lightning_modules.models.loading.gguf.metadata import Metadata
from lightning_modules.models.loading.gguf.reader import parse_gguf
from lightning_modules.models.loading.gguf.tokenizer import read_tokenizer
from lightning_modules.utilities.files import atomic_folder, default_cache_dir, writable_folder
from lightning_modules.utilities.identity import content_hash
from lightning_modules.utilities.locks import exclusive

FORMAT = 3
"""Version of the conversion: a folder of another version is not used."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
"""Dtype of the converted weights by the type of most of them. Quantized ones are rounded to bfloat16, which
changes them by a tenth of the error of 4 bits or less."""

log = logging.getLogger(__name__)


def model_folder(path_or_id: str, kind: str = "model") -> str:
    """Return the local folder or the hub id of a model or tokenizer; a GGUF file is converted into a folder first."""
    path = local_or_hub(path_or_id, kind)
    if not is_gguf(path):
        return path
    return str(convert_gguf(Path(path)))


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file into a folder with config, weights and tokenizer, once, and return the folder.

    It is in ``$LONGCE_CACHE/gguf`` and has 2 bytes per parameter, because quantized weights become bfloat16.

    Raises:
        ValueError: If the file is incomplete or split, or has an architecture, a key or a tensor whose effect on the
            model's numbers is not known.
    """
    folder = writable_folder(default_cache_dir() / "gguf") / f"{content_hash(file)}-{FORMAT}"
    # Several processes of a run may start at once; one of them converts.
    with exclusive(folder):
        if not folder.is_dir():
            with atomic_folder(folder) as building:
                _convert(file, building)
    return folder


def _convert(file: Path, folder: Path) -> None:
    size = file.stat().st_size / 1e9
    log.info("Converting '%s' (%.1f GB) once, into %s: this takes a minute or two per GB.", file, size, folder.parent)
    reader, metadata = _read_file(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # Norms are always float32, so the type of most parameters decides.
    kinds: Counter[str] = Counter()
    for tensor in tensors.values():
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    dtype = _DTYPES.get(max(kinds, key=lambda kind: kinds[kind]), torch.bfloat16)
    # 1. All that the file specifies, which must be understood.
    factors = None
    if metadata.architecture == "llama" and "rope_freqs.weight" in tensors:
        factors = torch.tensor(tensors.pop("rope_freqs.weight").data)
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = tuple(map(int, reversed(tensor.shape)))
    config, names = _match_parameters(metadata, shapes, factors)
    tokenizer = read_tokenizer(file, reader, metadata, type(config))
    metadata.check_all_taken()
    # 2. The weights as transformers stores them.
    weights = {}
    for name, tensor in tensors.items():
        values = original_values(names[name], _dequantize(tensor, metadata.name), metadata.architecture, config)
        weights[names[name]] = torch.from_numpy(values.copy()).to(dtype)
    # 3. The folder.
    config.dtype = dtype
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.save_pretrained(folder)
    save_torch_state_dict(weights, folder)
    tokenizer.save_pretrained(folder)


def _read_file(file: Path) -> tuple[Any, Metadata]:
    """Return the parsed file and its metadata, of a whole model of an architecture that is supported."""
    try:
        reader = parse_gguf(file)
        values = {name: _read_value(name, field) for name, field in reader.fields.items()}
    except ModuleNotFoundError as error:
        raise ValueError(
            f"'{file}' is a GGUF file, which needs the extra `gguf`: pip install -c constraints.txt -e '.[gguf]'."
        ) from error
    except Exception as error:  # any kind, for a file that is cut or something else
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"'{file}' is not a complete GGUF file ({reason:.200}): download it again.") from error
    if values.get("split.count", 1) > 1 or not reader.tensors or values.get("general.type", "model") != "model":
        raise ValueError(
            f"'{file}' has a part of a model, only its vocabulary, or an adapter: join the parts by `llama-gguf-split"
            " --merge`, or name the file of the model."
        )
    metadata = Metadata(str(file), values)
    if metadata.architecture not in ARCHITECTURES:
        raise ValueError(
            f"'{file}' has a model of architecture '{metadata.architecture}', which is not converted, because its"
            f" numbers have not been compared with those of the original. Use a file of {', '.join(ARCHITECTURES)}, or"
            " the model's folder of the Hugging Face hub."
        )
    return reader, metadata


def _read_value(name: str, field: Any) -> Any:
    # The tokenizer's arrays have up to a million entries, each of which takes Python a while.
    is_long = len(field.types) > 1 and name.startswith("tokenizer.")
    if is_long:
        return len(field.data)
    return field.contents()


def _match_parameters(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], factors: torch.Tensor | None
) -> tuple[PreTrainedConfig, dict[str, str]]:
    """Return the config and the parameter's name for each tensor; a ``ValueError`` unless they are all of the model."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    try:
        config = read_config(metadata, shapes, factors)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"'{metadata.name}' describes a model that cannot be built: {reason}") from error
    config.architectures = [type(model).__name__]
    stored_names = get_tensor_name_map(MODEL_ARCH[metadata.architecture.upper()], config.num_hidden_layers)
    names = {}
    for name, parameter in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if not (config.tie_word_embeddings and module == "lm_head"):
            stored = f"{stored_names.get_name(module)}.{kind}"
            names[stored] = name
            if shapes.get(stored) != tuple(parameter.shape):
                raise ValueError(
                    f"'{metadata.name}' has the shape {shapes.get(stored)} for the tensor `{stored}`, which has"
                    f" {tuple(parameter.shape)} in its model: download it again, or use the model's folder of the"
                    " Hugging Face hub instead."
                )
    unknown = sorted(shapes.keys() - names.keys())
    if unknown:
        raise ValueError(
            f"'{metadata.name}' has the tensor `{unknown[0]}`, which has no place in a model of architecture"
            f" '{metadata.architecture}', so its numbers would be wrong. Use the model's folder of the Hugging Face hub"
            " instead."
        )
    return config, names


def _dequantize(tensor: Any, file: str) -> Any:
    """Return the float32 array of a tensor."""
    from gguf import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"'{file}' stores the tensor `{tensor.name}` as {tensor.tensor_type.name}, which the package gguf cannot"
            " read: update it, or use a file of another quantization."
        ) from error
