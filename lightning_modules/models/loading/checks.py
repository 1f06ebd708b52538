"""Checks of a model's config and files before its weights are read, and of its scores before they are used."""

import contextlib
import json
import logging
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.attention import DOCUMENT_SDPA, AttentionWindow
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import ROPE_TYPES, wrap_attention
from lightning_modules.models.context_extension.rotary_checks import rope_parameter_sets
from lightning_modules.models.optimizations import eval_mode, uncompiled
from lightning_modules.utilities.errors import refused_pickle

log = logging.getLogger(__name__)

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
    check_sizes({name: getattr(text, name, None) for name in SIZES})
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


def check_scoring(backbone: Backbone) -> None:
    """Compare our scores of a dozen tokens with the model's own logits, for single and for packed documents.

    Optimizations that would change the scores are disabled: the last layer computes all tokens, and documents are
    isolated by the masks of transformers or, if those do not help, in separate forward passes.

    Raises:
        ValueError: If our logits differ from the model's own, flash attention from torch's attention, or compiled
            layers from the layers as written, which would make all results wrong.
    """
    # 1. Compare our logits of two documents with the model's own.
    # A fixed seed on the CPU gives all ranks the same tokens.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocabulary_size, (12,), generator=generator).to(backbone.device)
    documents = tokens.split([7, 5])
    name = type(backbone.base_model).__name__
    with torch.no_grad(), eval_mode(backbone):
        logits, error = backbone.unsharded(lambda: _compare(backbone, documents))
        if not all(torch.isfinite(of_document).all() for of_document in logits):
            raise ValueError(
                f"The logits of `{name}` are not finite: its weights are damaged, or they overflow in"
                f" {backbone.base_model.dtype}."
            )
        # Half precision rounds differently for other matrix shapes. The errors to be found (a missing scale, attention
        # across documents) are much larger.
        exact = logits[0].dtype in (torch.float32, torch.float64)
        if not error <= (1e-3 if exact else 0.03):
            raise ValueError(
                f"`{name}` is not supported: logits computed from its hidden states differ from its own by {error:.2g}"
                " standard deviations, so it must transform them in some other way. Use another model."
            )
        # 2. Find out which optimizations leave the scores of packed documents unchanged.
        tolerance = (0.01 if exact else 0.5) * max(1.0, logits[0].float().std().item())
        exact_scores = (of_document.float().log_softmax(-1) for of_document in logits)
        pairs = zip(documents, exact_scores, strict=True)
        expected = torch.cat([scores.gather(-1, ids[1:, None]).squeeze(-1) for ids, scores in pairs])
        if "flash" in backbone.attention:
            _check_kernel(backbone, documents, expected, tolerance)
        if any(part._compiled_call_impl is not None for part in backbone.modules()):
            _check_compiled(backbone, documents, tolerance)

        def agrees() -> bool:
            return bool((_score_packed(backbone, documents) - expected).abs().max() <= tolerance)

        if not backbone.is_stateful and not agrees() and backbone.attention == DOCUMENT_SDPA:
            log.warning("`%s` needs a mask of the whole sequence to isolate packed documents.", name)
            backbone.base_model.set_attn_implementation("sdpa")
        if not backbone.is_stateful:
            backbone.isolates_documents = agrees()
            # After the decision on attention, which it depends on.
            backbone.trims_last_layer = _can_trim(backbone, documents[0], tolerance)


def check_attention_window(backbone: Backbone, sinks: int = 0) -> None:
    """Raise a ``ValueError`` unless the model's attention can be limited to a window, which some models ignore."""
    layers, name = backbone.base_model.config.get_text_config(decoder=True).num_hidden_layers, backbone.attention
    wrap_attention(name)  # a kernel of the hub may not be wrapped yet
    generator = torch.Generator().manual_seed(0)
    # With a window of 2 tokens, each layer reaches one token further back, and sinks are the first tokens.
    ids = torch.randint(backbone.vocabulary_size, (2, sinks + layers + 3), generator=generator).to(backbone.device)
    ids[1] = torch.cat(
        [ids[0, :sinks], (ids[0, sinks : sinks + 1] + 1) % backbone.vocabulary_size, ids[0, sinks + 1 :]]
    )
    with torch.no_grad(), eval_mode(backbone):
        one, other = (backbone(pack_sequence([row, row]), window=AttentionWindow(2, sinks)) for row in ids)
        # The last token of each of the two documents.
        last = [ids.shape[1] - 1, 2 * ids.shape[1] - 1]
        limited = not backbone.is_stateful and torch.allclose(one[:, last], other[:, last], rtol=0, atol=1e-3)
    if not limited:
        raise ValueError(
            f"`short_context: sliding_window` does not support `{type(backbone.base_model).__name__}` with '{name}'"
            " attention, which ignores the window: set `attn_implementation` to sdpa, or `short_context: windows`."
        )


def _check_kernel(backbone: Backbone, documents: Sequence[Tensor], expected: Tensor, tolerance: float) -> None:
    """Raise a ``ValueError`` if torch's attention gives other log-likelihoods than a kernel from elsewhere."""
    kernel, model = backbone.attention, backbone.base_model
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    scores = _score_alone(backbone, documents)
    model.set_attn_implementation(kernel)
    what = f"The attention kernel '{kernel}' is wrong on this machine: update it, or set `attn_implementation: sdpa`."
    _check_close(scores, expected, tolerance, what)


def _check_compiled(backbone: Backbone, documents: Sequence[Tensor], tolerance: float) -> None:
    """Raise a ``ValueError`` if compiled layers give other log-likelihoods than the layers as written."""
    compiled = _score_alone(backbone, documents)
    with uncompiled(backbone):
        written = _score_alone(backbone, documents)
    what = "The compiled layers are wrong on this machine: update torch, or remove `compile: true`."
    _check_close(compiled, written, tolerance, what)


def _check_close(scores: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    difference = (scores - expected).abs().max().item()
    if not difference <= tolerance:  # also for NaN
        raise ValueError(f"{what} Log-likelihoods differ by {difference:.2g} nats.")


def _compare(backbone: Backbone, documents: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Return the model's own ``[n - 1, V]`` logits of each document, and the largest error of ours.

    The error is in units of their standard deviation. Both use hidden states of the same shape, so that even half
    precision hardly differs.
    """
    logits, errors = [], []
    for document in documents:
        inputs: dict[str, Any] = {"input_ids": document.unsqueeze(0), "use_cache": False}
        logits.append(backbone.model(**inputs).logits[0, :-1])
        # Logits at t predict token t + 1, so the last one is not compared.
        own = backbone.head(backbone.decoder(**inputs).last_hidden_state)[0, :-1]
        error = (own.float() - logits[-1].float()).abs().max()
        errors.append(error / logits[-1].float().std().clamp(min=1e-6))
    return logits, torch.stack(errors).max().item()


def _score_packed(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return log-likelihoods of all tokens but the first of each document, packed into one sequence."""
    batch = pack_sequence(documents)
    return backbone(batch)[batch["labels"] != IGNORE_INDEX]


def _score_alone(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return the same log-likelihoods, with one forward pass for each document."""
    return torch.cat([_score_packed(backbone, [document]) for document in documents])


def _can_trim(backbone: Backbone, document: Tensor, tolerance: float) -> bool:
    """Return whether the last layer gives the same scores if it skips tokens that are not scored."""
    batch = pack_sequence([document])
    start = len(document) // 2 + 1
    backbone.trims_last_layer = True
    try:
        trimmed = backbone(batch, first_scored=start)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any kind: modules of such a layer do not process tokens separately
        log.info("The last layer of %s computes all tokens: %r", type(backbone.base_model).__name__, error)
        return False
    # Now without trimming, for comparison; the caller stores the result.
    backbone.trims_last_layer = False
    return bool((trimmed - backbone(batch))[:, start:].abs().max() <= tolerance)
