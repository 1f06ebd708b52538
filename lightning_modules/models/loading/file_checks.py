"""Checks of a model's config and files before its weights are read."""

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

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


def check_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Raise a ``ValueError`` for a config that is not of a causal LM, or whose model would compute other numbers.

    Its sizes may be below 1, and transformers may only warn of its quantization method or RoPE type.
    """
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"Models of type '{config.model_type}' are not causal LMs. Use a decoder that predicts text.")
    weights = getattr(config, "transformers_weights", None)
    if weights:
        raise ValueError(
            f"`transformers_weights` of the model's config names other weights, '{weights}', which are not identified:"
            " remove it, and name them model.safetensors."
        )
    _check_sizes(config.get_text_config(decoder=True))
    for parameters in rope_parameter_sets(config):
        kind = parameters.get("rope_type", "default")
        known = sorted({"default", *ROPE_INIT_FUNCTIONS, *ROPE_TYPES})
        if kind not in known:
            raise ValueError(
                f"`rope_parameters.rope_type` of the model's config is '{kind}', which transformers does not support:"
                f" set it to one of {', '.join(known)}."
            )
    quantization = getattr(config, "quantization_config", None)
    # Weights of an unknown method would be read as ordinary ones, without their scales.
    if isinstance(quantization, dict) and not (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = quantization.get("quant_method")
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            raise ValueError(
                f"The model's config specifies weights quantized by {method!r} (`quantization_config.quant_method`),"
                f" which transformers does not support: it supports {', '.join(AUTO_QUANTIZATION_CONFIG_MAPPING)}. Use"
                " a model that is not quantized."
            )


def _check_sizes(config: PreTrainedConfig) -> None:
    for name in SIZES:
        with contextlib.suppress(RuntimeError):  # a size that differs from layer to layer, checked by transformers
            value = getattr(config, name, None)
            if isinstance(value, int) and value < 1:
                raise ValueError(
                    f"`{name}` of the model's config must be 1 or more, got {value}: correct it in config.json or"
                    " `model_config`."
                )


def check_index(folder: Path) -> None:
    """Raise a ``ValueError`` if the index of a folder lists missing weights, or others than its identity includes."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The index of weights '{index}' cannot be read ({error!r}). Fetch it again.") from error
    for name in sorted(names):
        if "/" in name or not name.endswith(".safetensors"):
            raise ValueError(f"'{index}' lists '{name}', which is not a .safetensors file beside it: move it there.")
        if not (folder / name).is_file():
            raise ValueError(f"'{folder}' lacks {name}, which {index.name} lists. Fetch the model again.")


def check_weight_files(folder: str) -> None:
    """Raise a ``ValueError`` for a local folder without weights, with truncated ones, or with pickled code."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        return  # a hub id, checked once it is fetched
    files = sorted(path.glob("*.safetensors"))
    pickled = sorted(path.glob("pytorch_model*.bin"))
    if not files and not pickled:
        raise ValueError(
            f"'{folder}' has no weights, neither a .safetensors file nor a pytorch_model.bin. Fetch the model again."
        )
    check_index(path)
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"The weights '{file}' are incomplete or damaged ({error}). Fetch the file again."
            ) from error
    if not files:  # pickles are read only without safetensors
        for file in pickled:
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
