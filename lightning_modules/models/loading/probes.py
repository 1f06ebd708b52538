"""Scores and hidden states of a few tokens, by us and by the model itself, for checks of a loaded model."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rotary_checks import index_free_length

FULL_PRECISION = (torch.float32, torch.float64)

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
"""Window size during the check, because a text shorter than the window would not show whether the mask is right."""


def is_exact(backbone: Backbone) -> bool:
    """Return whether the model computes in full precision."""
    half = torch.is_autocast_enabled(backbone.device.type)
    return not half and backbone.base_model.dtype in FULL_PRECISION


def vocabulary_size(backbone: Backbone) -> int:
    """Return the number of tokens that the model both reads and predicts."""
    # An embedding may have rows for prompts or pictures.
    return min(backbone.vocabulary_size, backbone.base_model.config.get_text_config(decoder=True).vocab_size)


def other_tokens(backbone: Backbone, tokens: Tensor) -> Tensor:
    """Return a different token for each of ``[n]`` tokens."""
    return (tokens + 1) % vocabulary_size(backbone)


@contextlib.contextmanager
def short_windows(backbone: Backbone) -> Iterator[None]:
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
def attention_of_transformers(backbone: Backbone) -> Iterator[None]:
    """Use the attention of torch or transformers instead of ours or an external kernel."""
    model = backbone.base_model
    attention = backbone.attention
    if attention not in ("sdpa", "eager"):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)


def own_logits(backbone: Backbone, documents: Sequence[Tensor]) -> list[Tensor]:
    """Return the model's own ``[n - 1, V]`` logits for each document alone."""
    # Logits at t predict token t + 1, so the last one is not compared. `forward` skips the hooks of the model: the
    # check may run inside one of its passes (`apply_longce`), which the hooks of FSDP2 would end.
    return [backbone.model.forward(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1] for ids in documents]


def compare_logits(backbone: Backbone, documents: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Return the model's own ``[n - 1, V]`` logits of each document, and the largest error of ours.

    The error is in units of their standard deviation. Both use hidden states of the same shape, so that even half
    precision hardly differs.
    """
    logits = own_logits(backbone, documents)
    errors = []
    for document, own in zip(documents, logits, strict=True):
        hidden_states = backbone.run_decoder(input_ids=document.unsqueeze(0))
        head = backbone.base_model.get_output_embeddings()
        if type(head) is nn.Linear and head.in_features != hidden_states.shape[-1]:  # a head of several layers
            return logits, math.inf
        ours = backbone.head(hidden_states)[0, :-1]
        errors.append((ours.float() - own.float()).abs().max() / own.float().std().clamp(min=1e-6))
    return logits, torch.stack(errors).max().item()


def gather_scores(logits: Sequence[Tensor], documents: Sequence[Tensor]) -> Tensor:
    """Return the log-likelihoods of all tokens but the first of each document."""
    scores = []
    for of_document, ids in zip(logits, documents, strict=True):
        scores.append(of_document.float().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1))
    return torch.cat(scores)


def score_packed(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return log-likelihoods of all tokens but the first of each document, packed into one sequence."""
    batch = pack_sequence(documents)
    return backbone(batch)[batch["labels"] != IGNORE_INDEX]


def score_alone(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return the same log-likelihoods, with one forward pass for each document."""
    return torch.cat([score_packed(backbone, [document]) for document in documents])


def largest_error(backbone: Backbone, documents: Sequence[Tensor], expected: Tensor) -> float:
    """Return the largest error in nats of single documents, as we score them and as the model reads a prompt."""
    prompts = gather_scores(backbone.unsharded(partial(own_logits, backbone, documents)), documents)
    scores = torch.stack([score_alone(backbone, documents), prompts])
    return (scores - expected).abs().max().item()


def are_equal(backbone: Backbone, states: Tensor, others: Tensor) -> bool:
    """Return whether ``[T, D]`` hidden states are equal for each token."""
    # States that do not depend on the difference are equal to the last bit, or nearly equal if tokens share experts.
    # 8-bit products are scaled by the largest value over all tokens.
    quantized = getattr(backbone.base_model, "is_quantized", False)
    exact = is_exact(backbone) and states.dtype in FULL_PRECISION
    limit = 0.1 if quantized else 1e-5 if exact else 1e-3
    change = (states - others).float().abs().mean(-1)
    return bool((change <= limit * states.float().abs().mean()).all())
