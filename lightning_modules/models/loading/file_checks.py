"""Checks of a model's config and files before its weights are read."""

import contextlib
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lightning_modules.models.context_extension.rope_types import ROPE_TYPES
from lightning_modules.models.context_extension.rotary_checks import rope_parameter_sets
from lightning_modules.utilities.errors import refused_pickle

SIZES = ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""Sizes of a config that must be 1 or more. A model with 0 layers could be built, and would even score."""

INDEX = "model.safetensors.index.json"


def check_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise a ``ValueError`` for a config that is not of a causal LM, or has invalid values.

    These are sizes out of range, unknown quantization methods, and unknown types, factors and bases of RoPE, about
    which transformers only warns.
    """
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"Models of type '{config.model_type}' are not causal LMs. Use a decoder that predicts text.")
    text = config.get_text_config(decoder=True)
    # A size that differs from layer to layer raises a ``RuntimeError``; transformers has checked it.
    for name in SIZES:
        with contextlib.suppress(RuntimeError):
            check_sizes({name: getattr(text, name, None)})
    _check_quantization(getattr(config, "quantization_config", None))
    for parameters in rope_parameter_sets(config):
        _check_rope(parameters)


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a size in a config or its overrides is below 1."""
    for name in SIZES:
        value = values.get(name)
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"`{name}` of the model's config must be 1 or more, got {value}: correct config.json or `model_config`."
            )


def _check_quantization(settings: Any) -> None:
    """Raise a ``ValueError`` for quantized weights that would be read as ordinary ones, without their scales."""
    if not isinstance(settings, dict) or settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return
    known = list(AUTO_QUANTIZATION_CONFIG_MAPPING)
    if settings.get("quant_method") not in known:
        raise ValueError(
            f"The model's config specifies weights quantized by {settings.get('quant_method')!r}"
            f" (`quantization_config.quant_method`), which transformers does not support: it supports"
            f" {', '.join(known)}. Update transformers, or use a model that is not quantized."
        )


def check_weight_files(folder: str) -> None:
    """Raise a ``ValueError`` for a local folder with missing or truncated weights, or pickles of more than weights."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        return  # a hub id, checked once it is fetched
    # Pickles are read only without safetensors.
    files, pickled = sorted(path.glob("*.safetensors")), sorted(path.glob("pytorch_model*.bin"))
    if not files:
        _check_pickles(pickled)
    if not files and not pickled and not (path / "pytorch_model.bin.index.json").is_file():
        raise ValueError(
            f"'{folder}' has no weights, neither a .safetensors file nor a pytorch_model.bin. Fetch the model again."
        )
    index = path / INDEX
    if index.is_file() and (missing := {name for name in _read_index(index) if not (path / name).is_file()}):
        raise ValueError(f"'{folder}' lacks {', '.join(sorted(missing))}, listed in {INDEX}. Fetch the model again.")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"The weights '{file}' are incomplete or damaged ({error}). Fetch the file again."
            ) from error


def _check_pickles(files: list[Path]) -> None:
    for file in files:
        # An old format, which cannot be mapped, is checked when it is loaded.
        with contextlib.suppress(RuntimeError), pickles_refused(file):
            torch.load(file, map_location="meta", mmap=True, weights_only=True)


@contextlib.contextmanager
def pickles_refused(path: str | Path) -> Iterator[None]:
    """Name the weights and the remedy where torch refuses to unpickle them."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The weights '{path}' cannot be used: a file {refused_pickle(error)}. Use a model with .safetensors files."
        ) from error


def _read_index(index: Path) -> set[str]:
    """Return the names of the files in an index."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The index of weights '{index}' cannot be read ({error!r}). Fetch it again.") from error


def _check_rope(parameters: dict[str, Any]) -> None:
    kind = parameters.get("rope_type", "default")
    known = sorted({"default", *ROPE_INIT_FUNCTIONS, *ROPE_TYPES})
    if kind not in known:
        raise ValueError(
            f"`rope_parameters.rope_type` of the model's config is '{kind}', which transformers does not support:"
            f" set it to one of {', '.join(known)}."
        )
    for name, minimum in (("rope_theta", 0), ("factor", 1)):
        value = parameters.get(name)
        if value is None and not (name == "factor" and kind in ("linear", "yarn", "llama3")):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value < math.inf
        if not number or value == 0:
            wanted = "a number of 1 or more" if minimum else "a number above 0"
            raise ValueError(
                f"`rope_parameters.{name}` of the model's config must be {wanted}, got {value!r}. Correct it, or use"
                " `context_extension`."
            )
