"""Checks of a model: its config and files before weights are read, and its scores before any number is trusted."""

import json
import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import ROPE_TYPES
from lightning_modules.models.context_extension.rotary_checks import rope_parts
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.utilities.pickles import refused_pickle

log = logging.getLogger(__name__)

LARGEST = dict.fromkeys(("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"), 2**31 - 1)
LARGEST["num_hidden_layers"] = 10_000
"""Counts of a config that a model has if it has any, with the most that make sense; of 0 layers it would be made, and
score, and of a million it would take minutes to be made. Known models have up to about a hundred."""

INDEX = "model.safetensors.index.json"


def check_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse a config that is not that of a causal LM, or that would compute nonsense.

    Raises:
        ValueError: If the model type is not a causal LM, a count is out of range, the quantization method is unknown to
            transformers, or the RoPE has an unknown type, or a factor or base that is not a number above 0, for which
            transformers only warns.
    """
    if not trust_remote_code and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"Models of type '{config.model_type}' are not causal LMs. Name a decoder that predicts text.")
    text = config.get_text_config(decoder=True)
    check_sizes({name: getattr(text, name, None) for name in LARGEST})
    _check_quantization(getattr(config, "quantization_config", None))
    for part in rope_parts(config):
        _check_rope(part)


def check_sizes(values: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for a count in a config, or in what replaces values of it, that is out of range."""
    for name, maximum in LARGEST.items():
        value = values.get(name)
        if isinstance(value, int) and not 1 <= value <= maximum:
            limit = "1 or more" if value < 1 else f"at most {maximum:,}"
            raise ValueError(
                f"`{name}` of the model's config must be {limit}, got {value}. Correct config.json, or `model_config`."
            )


def _check_quantization(settings: Any) -> None:
    """Refuse quantized weights that would be read as ordinary ones, without their scales."""
    if not isinstance(settings, dict) or settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return
    known = list(AUTO_QUANTIZATION_CONFIG_MAPPING)
    if settings.get("quant_method") not in known:
        raise ValueError(
            f"The model's config specifies weights quantized by {settings.get('quant_method')!r}"
            f" (`quantization_config.quant_method`), which transformers does not know: it knows {', '.join(known)}."
            " Update transformers, or name a model that is not quantized."
        )


def check_weight_files(folder: str) -> None:
    """Check the headers of the weights in a local folder for torn and missing files.

    Raises:
        ValueError: If the folder has no weights, a file of the index is missing, a safetensors file is shorter than its
            header specifies, or a pickled file holds more than weights.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        return  # a hub id, unknown until it is fetched
    files, pickled = sorted(path.glob("*.safetensors")), sorted(path.glob("pytorch_model*.bin"))
    if not files:
        _check_pickles(pickled)
    if not files and not pickled and not (path / "pytorch_model.bin.index.json").is_file():
        raise ValueError(
            f"'{folder}' has no weights, neither a .safetensors file nor a pytorch_model.bin. Fetch the model again."
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


def _check_rope(parameters: dict[str, Any]) -> None:
    kind = parameters.get("rope_type", "default")
    known = sorted({"default", *ROPE_INIT_FUNCTIONS, *ROPE_TYPES})
    if kind not in known:
        raise ValueError(
            f"`rope_parameters.rope_type` of the model's config is '{kind}', which transformers does not know: it knows"
            f" {', '.join(known)}. Correct it, or load the model where its type is registered."
        )
    for name, minimum in (("rope_theta", 0), ("factor", 1)):
        value = parameters.get(name)
        if value is None and not (name == "factor" and kind in ("linear", "yarn", "llama3")):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value < math.inf
        if not number or value == 0:
            wanted = "a number of 1 or more" if minimum else "a number above 0"
            raise ValueError(
                f"`rope_parameters.{name}` of the model's config must be {wanted}, got {value!r}: positions would have"
                " no meaning. Correct it, or use `context_extension`."
            )


def check_scoring(backbone: Backbone) -> None:
    """Compare our scores of a dozen tokens with the model's own logits, document by document and packed in a row.

    Optimizations that change the scores are switched off. A model that mixes up documents under our attention gets the
    masks of transformers; if those do not help, it is only refused sequences of several documents. A last layer that
    cannot skip unused tokens computes all of them.

    Raises:
        ValueError: If they disagree: the model does something to its logits or positions that is not known here, and
            every number would be wrong.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocabulary_size, (12,), generator=generator).to(backbone.device)
    documents = tokens.split([7, 5])
    name = type(backbone.base_model).__name__
    with torch.no_grad(), eval_mode(backbone):
        logits, error = backbone.unsharded(lambda: _compare(backbone, documents))
        if not all(torch.isfinite(part).all() for part in logits):
            raise ValueError(
                f"`{name}` gives logits that are not finite for a few plain tokens: its weights are damaged, or"
                f" {backbone.base_model.dtype} is too narrow for it."
            )
        # Half precision rounds differently for other matrix shapes; a forgotten scale or a leak is far above that.
        exact = logits[0].dtype in (torch.float32, torch.float64)
        if not error <= (1e-3 if exact else 0.03):
            raise ValueError(
                f"`{name}` cannot be scored from its hidden states: its logits are off by {error:.2g} of their spread."
                " It does something to them that is not known here."
            )
        tolerance = (0.01 if exact else 0.5) * max(1.0, logits[0].float().std().item())
        expected = torch.cat([_log_likelihood(*pair) for pair in zip(documents, logits, strict=True)])

        def agrees() -> bool:
            return bool((_score_packed(backbone, documents) - expected).abs().max() <= tolerance)

        if not backbone.is_stateful and not agrees() and backbone.attention == DOCUMENT_SDPA:
            log.warning("Packed documents need a mask of the whole row: %s", name)
            backbone.base_model.set_attn_implementation("sdpa")
        if not backbone.is_stateful:
            backbone.isolates_documents = agrees()
            backbone.trims_last_layer = _trims(backbone, documents[0], tolerance)


def _compare(backbone: Backbone, documents: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """The model's own ``[n - 1, V]`` logits of each document, and how far ours are from them."""
    logits = [backbone.model(input_ids=part.unsqueeze(0), use_cache=False).logits[0, :-1] for part in documents]
    return logits, max(_head_error(backbone, *pair) for pair in zip(documents, logits, strict=True))


def _log_likelihood(document: Tensor, logits: Tensor) -> Tensor:
    """``[n - 1]`` log-likelihoods of all tokens but the first, from full logits."""
    return logits.float().log_softmax(-1).gather(-1, document[1:, None]).squeeze(-1)


def _head_error(backbone: Backbone, document: Tensor, logits: Tensor) -> float:
    """Largest difference of our logits to the model's own, as a share of their standard deviation.

    Both come from hidden states of the same shape, so that even half precision hardly differs.
    """
    hidden_states = backbone.decoder(input_ids=document.unsqueeze(0), use_cache=False).last_hidden_state
    difference = backbone.head(hidden_states)[0, :-1].float() - logits.float()
    return (difference.abs().max() / logits.float().std().clamp(min=1e-6)).item()


def _score_packed(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Log-likelihoods of all tokens but the first of each document, packed into one row."""
    row = pack_sequence(documents)
    return backbone(row)[row["labels"] != IGNORE_INDEX]


def _trims(backbone: Backbone, document: Tensor, tolerance: float) -> bool:
    """Whether the last layer gives the same for the last tokens if it works on them only."""
    row = pack_sequence([document])
    start = len(document) // 2 + 1
    backbone.trims_last_layer = True
    try:
        trimmed = backbone(row, first_scored=start)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any kind: parts of such a layer do not work on single tokens
        log.info("The last layer of %s works on all tokens: %r", type(backbone.base_model).__name__, error)
        return False
    backbone.trims_last_layer = False
    return bool((trimmed - backbone(row))[:, start:].abs().max() <= tolerance)
