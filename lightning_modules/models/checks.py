"""What can be known to be wrong with a model by its config and the headers of its files, before weights are read."""

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lightning_modules.models.context_extension.rope_types import ROPE_TYPES
from lightning_modules.utilities.pickles import refused_pickle

LARGEST = dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"), 2**31 - 1)
LARGEST["num_hidden_layers"] = 10_000
"""Counts of a config that a model has if it has any, with the most that make sense; of 0 layers it would be made, and
score, and of a million it would take minutes to be made. Known models have up to about a hundred."""

INDEX = "model.safetensors.index.json"


def check_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse a config of which transformers would make no causal LM, or one that computes nonsense.

    Raises:
        ValueError: If it is of another kind of model, a count is out of range, its weights are quantised in a way that
            transformers does not know, or its RoPE has an unknown type or a factor or base that is no number above 0.
            Of the latter transformers only warns, and computes on.
    """
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"Models of type '{config.model_type}' are no causal LMs. Name a decoder that predicts text.")
    text = config.get_text_config(decoder=True)
    check_sizes({name: getattr(text, name, None) for name in LARGEST})
    _check_quantization(getattr(config, "quantization_config", None))
    for part in _rope_parts(text):
        _check_rope(part)


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for a count in a config, or in what replaces values of it, that is out of range."""
    for name, most in LARGEST.items():
        value = values.get(name)
        if isinstance(value, int) and not 1 <= value <= most:
            limit = "1 or more" if value < 1 else f"at most {most:,}"
            raise ValueError(
                f"`{name}` of the model's config must be {limit}, got {value}. Mend its config.json, or `model_config`."
            )


def _check_quantization(settings: Any) -> None:
    """Refuse quantised weights that would be read as if they were ordinary ones, without their scales."""
    if not isinstance(settings, dict) or settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return
    known = list(AUTO_QUANTIZATION_CONFIG_MAPPING)
    if settings.get("quant_method") not in known:
        raise ValueError(
            f"The model's config says that its weights are quantised by {settings.get('quant_method')!r}"
            f" (`quantization_config.quant_method`), which transformers does not know: it knows {', '.join(known)}."
            " Update transformers, or name a model that is not quantised."
        )


def check_weight_files(folder: str) -> None:
    """Look at the headers of the weights in a local folder: they tell whether a file is torn or one is missing.

    Raises:
        ValueError: If there are no weights, one of the files in the index is missing, or a safetensors file is not as
            long as its header says, or a pickled file holds more than weights.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        return  # of a hub id nothing is known without fetching it
    files, pickled = sorted(path.glob("*.safetensors")), sorted(path.glob("pytorch_model*.bin"))
    if not files:
        _check_pickles(pickled)
    if not files and not pickled and not (path / "pytorch_model.bin.index.json").is_file():
        raise ValueError(
            f"There are no weights in '{folder}': it has no .safetensors file and no pytorch_model.bin. Fetch the model"
            " again."
        )
    index = path / INDEX
    if index.is_file() and (missing := {name for name in _indexed(index) if not (path / name).is_file()}):
        raise ValueError(f"'{folder}' lacks {', '.join(sorted(missing))}, which {INDEX} names. Fetch the model again.")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"The weights '{file}' are torn or damaged ({error}). Fetch the file again.") from error


def _check_pickles(files: list[Path]) -> None:
    for file in files:
        try:
            torch.load(file, map_location="meta", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"The weights '{file}' cannot be used: the file {refused_pickle(error)}. Name a model with .safetensors"
                " files."
            ) from error
        except RuntimeError:  # an old format, which cannot be mapped: it is checked as it is loaded
            continue


def _indexed(index: Path) -> set[str]:
    """Names of the files that an index names."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The index of weights '{index}' cannot be read ({error!r}). Fetch it again.") from error


def _rope_parts(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters, of which some models have several, for layers of different kinds."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    nested = [part for part in parameters.values() if isinstance(part, dict)]
    return nested or [parameters]


def _check_rope(parameters: dict[str, Any]) -> None:
    kind = parameters.get("rope_type", "default")
    known = sorted({"default", *ROPE_INIT_FUNCTIONS, *ROPE_TYPES})
    if kind not in known:
        raise ValueError(
            f"`rope_parameters.rope_type` of the model's config is '{kind}', which transformers does not know: it knows"
            f" {', '.join(known)}. Correct it, or load the model where its type is registered."
        )
    for name, least in (("rope_theta", 0), ("factor", 1)):
        value = parameters.get(name)
        if value is None and not (name == "factor" and kind in ("linear", "yarn", "llama3")):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf
        if not number or value == 0:
            wanted = "a number of 1 or more" if least else "a number above 0"
            raise ValueError(
                f"`rope_parameters.{name}` of the model's config must be {wanted}, got {value!r}: positions would mean"
                " nothing to the model. Correct it, or use `context_extension`."
            )
