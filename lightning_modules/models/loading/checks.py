"""Checks of a loaded model: whether its scores are right, and how documents can share a forward pass."""

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import wrap_attention
from lightning_modules.models.context_extension.rotary_checks import index_free_length
from lightning_modules.models.optimizations import eval_mode, uncompiled

_FULL = (torch.float32, torch.float64)

log = logging.getLogger(__name__)

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "keep_window_size",
    "local_attention",
    "local_attention_window_len",
    "attention_chunk_size",
    "index_topk",
)
"""Names in configs and modules for the number of tokens that a layer sees, or chooses from all tokens."""

PROBED_WINDOW = 3
"""What windows are set to for the check: a shorter text than the window would not show whether its mask is right."""


def check_scoring(backbone: Backbone) -> None:
    """Compare our scores of a dozen tokens with the model's own logits, for single and for packed documents.

    The reference are the logits that the model gives for each document alone, with an attention implementation of
    transformers. What the check finds is stored in the backbone: whether documents can be packed into one forward pass,
    by our attention or by the masks of transformers; otherwise each document gets its own pass. It runs once for a
    device, dtype, precision and attention implementation.

    Raises:
        ValueError: If our log-likelihoods differ from the model's own, or those of compiled layers from the layers as
            written, which would make all results wrong.
    """
    if backbone.checked_conditions == _conditions(backbone):
        return
    # A fixed seed on the CPU gives all ranks the same tokens.
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(_vocabulary(backbone), (12,), generator=generator).to(backbone.device).split([7, 5])
    name, attention = type(backbone.base_model).__name__, backbone.attention
    with torch.no_grad(), eval_mode(backbone), _short_windows(backbone):
        # 1. Compare our logits of two documents with the model's own, by an attention that we did not write.
        with _attention_of_transformers(backbone):
            logits, error = backbone.unsharded(lambda: _compare(backbone, documents))
        if not all(torch.isfinite(of_document).all() for of_document in logits):
            raise ValueError(
                f"The logits of `{name}` are not finite: its weights are damaged, or they overflow in"
                f" {backbone.base_model.dtype}."
            )
        # Half precision rounds differently for other matrix shapes. The errors to be found (a missing scale, attention
        # across documents) are much larger. Logits may be in float32 although the layers compute in half precision.
        exact = _is_exact(backbone) and logits[0].dtype in _FULL
        if not error <= (1e-3 if exact else 0.03):
            raise ValueError(
                f"`{name}` is not supported: logits computed from its hidden states differ from its own by {error:.2g}"
                " standard deviations, so it must transform them in some other way. Use another model."
            )
        if not _is_causal(backbone, documents[0]):
            raise ValueError(
                f"`{name}` is not a causal LM: its hidden states depend on the tokens that follow, which it should"
                " predict. Use another model, or set `is_decoder: true` in `model_config` if it has this key."
            )
        # 2. Compare compiled layers with the layers as written.
        tolerance = (0.01 if exact else 0.5) * max(1.0, logits[0].float().std().item())
        expected = _gather_scores(logits, documents)
        if any(part._compiled_call_impl is not None for part in backbone.modules()):
            _check_compiled(backbone, documents, tolerance)
        # 3. Find out how packed documents can be scored like single ones.
        difference = _choose_masks(backbone, documents, expected, tolerance, exact=exact)
        if not difference <= tolerance:
            raise ValueError(
                f"The attention kernel '{attention}' is wrong on this machine: update it, or set"
                " `attn_implementation` to another one, such as sdpa or eager. Log-likelihoods differ by"
                f" {difference:.2g} nats."
            )
    backbone.checked_conditions = _conditions(backbone)


def _choose_masks(
    backbone: Backbone, documents: Sequence[Tensor], expected: Tensor, tolerance: float, *, exact: bool
) -> float:
    """Let documents be separated by our attention, masks of transformers, or passes of their own, in this order.

    Returns the largest error in nats of single documents, by our attention, a kernel from elsewhere or those masks.
    """
    attention = backbone.attention
    difference = _largest_error(backbone, documents, expected)
    is_right = difference <= tolerance  # False for NaN
    isolates = is_right and _isolates(backbone, documents, expected, tolerance, exact=exact)
    if attention == DOCUMENT_SDPA and not (isolates or (is_right and backbone.is_stateful)):
        backbone.base_model.set_attn_implementation("sdpa")
        with_masks = _largest_error(backbone, documents, expected)
        isolates = with_masks <= tolerance and _isolates(backbone, documents, expected, tolerance, exact=exact)
        if isolates or not is_right:
            log.warning("`%s` needs the attention masks of transformers.", type(backbone.base_model).__name__)
            difference = with_masks
        else:  # masks do not separate its documents either
            backbone.base_model.set_attn_implementation(attention)
    backbone.isolates_documents = isolates and _isolates_in_full_precision(backbone, documents)
    return difference


def has_training_noise(backbone: Backbone) -> bool:
    """Return whether scores are random in training mode, in which the model must be: dropout or noise in a router."""
    # Dropout in adapters that start at 0, or rare noise, would not show in a few passes.
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in backbone.modules()):
        return True
    config = backbone.base_model.config.get_text_config(decoder=True)
    for name, value in vars(config).items():
        if re.search("jitter|noise|layerdrop|attention_dropout", name) and isinstance(value, int | float) and value > 0:
            return True
    # Other models have other names for it.
    length = min(64, getattr(config, "max_position_embeddings", None) or 64)
    batch = pack_sequence([torch.arange(length, device=backbone.device) % _vocabulary(backbone)])
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        passes = [backbone.unsharded(partial(backbone.hidden_states, batch))[0].float() for _ in range(4)]
    limit = 1e-4 if _is_exact(backbone) else 0.01
    return any((states - passes[0]).abs().mean() > limit * passes[0].abs().mean() for states in passes[1:])


def _is_exact(backbone: Backbone) -> bool:
    """Return whether the model computes in full precision."""
    half = torch.is_autocast_enabled(backbone.device.type)
    return not half and backbone.base_model.dtype in _FULL


def _conditions(backbone: Backbone) -> tuple[Any, ...]:
    """Return what decides which kernels compute the scores."""
    device = backbone.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return backbone.device, backbone.base_model.dtype, autocast, backbone.attention, backbone.is_sharded


@contextlib.contextmanager
def _short_windows(backbone: Backbone) -> Iterator[None]:
    """Let windows of attention be `PROBED_WINDOW` tokens long, and restore them afterwards."""
    config = backbone.base_model.config.get_text_config(decoder=True)
    # Llama 4 is packed only into sequences shorter than a chunk, so the check must be shorter as well.
    names = [name for name in WINDOWS if name != "attention_chunk_size" or index_free_length(config) is None]
    changed = []
    # Modules have their own copies, and layers of some models their own configs.
    modules = list(backbone.base_model.modules())
    of_modules = [getattr(module, "config", None) for module in modules]
    configs = {id(each): each for each in (config, *of_modules) if isinstance(each, PreTrainedConfig)}
    for owner in (*configs.values(), *modules):
        for name in names:
            value = vars(owner).get(name)
            if isinstance(value, int) and value > PROBED_WINDOW:
                changed.append((owner, name, value))
                setattr(owner, name, PROBED_WINDOW)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


@contextlib.contextmanager
def _attention_of_transformers(backbone: Backbone) -> Iterator[None]:
    """Use attention of torch or transformers instead of our own, or of a kernel from elsewhere."""
    model, attention = backbone.base_model, backbone.attention
    if attention not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)


def _isolates(
    backbone: Backbone, documents: Sequence[Tensor], expected: Tensor, tolerance: float, *, exact: bool
) -> bool:
    """Return whether documents in one forward pass have their scores, and do not see each other."""
    if backbone.is_stateful:
        return False
    # The pass for all documents, whatever was decided before.
    backbone.isolates_documents = True
    errors = (_score_packed(backbone, documents) - expected).abs()
    # Half precision may choose another expert for a token, with an error as large as the others, but for few tokens.
    if not (errors.max() <= tolerance and (exact or errors.mean() <= 0.16 * tolerance)):
        return False
    # In a model that is not trained yet, scores hardly depend on the context, but hidden states do.
    first, second = documents
    others = [pack_sequence([ids, second]) for ids in (first, _other_tokens(backbone, first))]
    states = [backbone.unsharded(partial(backbone.hidden_states, packed))[0, len(first) :] for packed in others]
    return _are_equal(backbone, *states)


def _isolates_in_full_precision(backbone: Backbone, documents: Sequence[Tensor]) -> bool:
    """Return what `_isolates` finds without autocast, whose rounding hides small leaks; True if there is none."""
    device = backbone.device.type
    if not torch.is_autocast_enabled(device) or backbone.base_model.dtype not in _FULL or "flash" in backbone.attention:
        return True
    with torch.autocast(device, enabled=False):
        with _attention_of_transformers(backbone):
            logits, _ = backbone.unsharded(lambda: _compare(backbone, documents))
        tolerance = 0.01 * max(1.0, logits[0].float().std().item())
        return _isolates(backbone, documents, _gather_scores(logits, documents), tolerance, exact=True)


def _is_causal(backbone: Backbone, document: Tensor) -> bool:
    """Return whether hidden states of a document stay as they are when its last token is another one."""
    last = len(document) - 1
    other = torch.cat([document[:last], _other_tokens(backbone, document[last:])])
    batches = [pack_sequence([ids]) for ids in (document, other)]
    states = [backbone.unsharded(partial(backbone.hidden_states, batch))[0, :last] for batch in batches]
    return _are_equal(backbone, *states)


def _other_tokens(backbone: Backbone, tokens: Tensor) -> Tensor:
    return (tokens + 1) % _vocabulary(backbone)


def _vocabulary(backbone: Backbone) -> int:
    """Return the number of tokens that the model both reads and predicts."""
    # An embedding may have rows for prompts or pictures.
    return min(backbone.vocabulary_size, backbone.base_model.config.get_text_config(decoder=True).vocab_size)


def _are_equal(backbone: Backbone, states: Tensor, others: Tensor) -> bool:
    """Return whether ``[T, D]`` hidden states are equal for each token."""
    # They are, to the last bit, where nothing is seen of what differs, or nearly where tokens share experts. Products
    # in 8 bits are scaled by the largest of all tokens.
    quantized = getattr(backbone.base_model, "is_quantized", False)
    exact = _is_exact(backbone) and states.dtype in _FULL
    limit = 0.1 if quantized else 1e-5 if exact else 1e-3
    change = (states - others).float().abs().mean(-1)
    return bool((change <= limit * states.float().abs().mean()).all())


def check_attention_window(backbone: Backbone) -> None:
    """Raise a ``ValueError`` unless the model's attention can be limited to a window, which some models ignore."""
    layers, name = backbone.base_model.config.get_text_config(decoder=True).num_hidden_layers, backbone.attention
    wrap_attention(name)  # a kernel of the hub may not be wrapped yet
    generator = torch.Generator().manual_seed(0)
    # Two texts with different first tokens. With a window of 2 tokens, each layer reaches one token further back.
    ids = torch.randint(backbone.vocabulary_size, (layers + 3,), generator=generator).repeat(2, 1).to(backbone.device)
    ids[1, 0] = (ids[0, 0] + 1) % backbone.vocabulary_size
    with torch.no_grad(), eval_mode(backbone):
        one, other = (backbone(pack_sequence([row, row]), window=2) for row in ids)
        # The last token of each of the two documents.
        last = [ids.shape[1] - 1, 2 * ids.shape[1] - 1]
        limited = not backbone.is_stateful and torch.allclose(one[:, last], other[:, last], rtol=0, atol=1e-3)
    if not limited:
        raise ValueError(
            f"`short_context: sliding_window` does not support `{type(backbone.base_model).__name__}` with '{name}'"
            " attention, which ignores the window: set `attn_implementation` to sdpa, or `short_context: windows`."
        )


def _check_compiled(backbone: Backbone, documents: Sequence[Tensor], tolerance: float) -> None:
    """Raise a ``ValueError`` if compiled layers give other log-likelihoods than the layers as written."""
    compiled = _score_alone(backbone, documents)
    with uncompiled(backbone):
        written = _score_alone(backbone, documents)
    difference = (compiled - written).abs().max().item()
    if not difference <= tolerance:  # also for NaN
        raise ValueError(
            "The compiled layers are wrong on this machine: update torch, or remove `compile: true`. Log-likelihoods"
            f" differ by {difference:.2g} nats."
        )


def _compare(backbone: Backbone, documents: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Return the model's own ``[n - 1, V]`` logits of each document, and the largest error of ours.

    The error is in units of their standard deviation. Both use hidden states of the same shape, so that even half
    precision hardly differs.
    """
    logits = _own_logits(backbone, documents)
    errors = []
    for document, own in zip(documents, logits, strict=True):
        hidden_states = backbone.run_decoder(input_ids=document.unsqueeze(0))
        head = backbone.base_model.get_output_embeddings()
        if type(head) is nn.Linear and head.in_features != hidden_states.shape[-1]:  # a head of several layers
            return logits, math.inf
        ours = backbone.head(hidden_states)[0, :-1]
        errors.append((ours.float() - own.float()).abs().max() / own.float().std().clamp(min=1e-6))
    return logits, torch.stack(errors).max().item()


def _own_logits(backbone: Backbone, documents: Sequence[Tensor]) -> list[Tensor]:
    """Return the ``[n - 1, V]`` logits that the model itself gives for each document alone."""
    # Logits at t predict token t + 1, so the last one is not compared.
    return [backbone.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1] for ids in documents]


def _gather_scores(logits: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """Return the log-likelihoods of all tokens but the first of each document."""
    scores = []
    for of_document, ids in zip(logits, documents, strict=True):
        scores.append(of_document.float().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1))
    return torch.cat(scores)


def _largest_error(backbone: Backbone, documents: Sequence[Tensor], expected: Tensor) -> float:
    """Return the largest error in nats of single documents, as we score them and as the model reads a prompt."""
    prompts = _gather_scores(backbone.unsharded(partial(_own_logits, backbone, documents)), documents)
    scores = torch.stack([_score_alone(backbone, documents), prompts])
    return (scores - expected).abs().max().item()


def _score_packed(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return log-likelihoods of all tokens but the first of each document, packed into one sequence."""
    batch = pack_sequence(documents)
    return backbone(batch)[batch["labels"] != IGNORE_INDEX]


def _score_alone(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return the same log-likelihoods, with one forward pass for each document."""
    return torch.cat([_score_packed(backbone, [document]) for document in documents])
