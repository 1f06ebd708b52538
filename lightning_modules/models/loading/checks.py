"""Checks of a loaded model: whether its scores are right, and what training needs of it."""

import logging
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.batch import pack_sequence
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import wrap_attention
from lightning_modules.models.loading.isolation import choose_masks, is_causal
from lightning_modules.models.loading.probes import (
    FULL_PRECISION,
    attention_of_transformers,
    compare_logits,
    gather_scores,
    is_exact,
    score_alone,
    short_windows,
    vocabulary_size,
)
from lightning_modules.models.optimizations import (
    eval_mode,
    fused_norms,
    is_compiled,
    remove_compiled,
    uncompiled,
    unfused,
)

_log = logging.getLogger(__name__)


def check_scoring(backbone: Backbone) -> None:
    """Compare our scores of a dozen tokens with the model's own logits, for single and for packed documents.

    The reference is the model's logits for each document alone, with an attention implementation of transformers. The
    result is stored in the backbone: whether documents can be packed into one forward pass, by our attention or by the
    masks of transformers; otherwise each document gets its own pass. The check runs once for each combination of
    device, dtype, precision and attention implementation.

    Raises:
        ValueError: If our log-likelihoods differ from the model's own, or those of compiled layers or fused norms from
            the layers as written, which would make all results wrong.
    """
    if backbone.checked_conditions == _conditions(backbone):
        return
    # A fixed seed on the CPU gives all ranks the same tokens.
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(vocabulary_size(backbone), (12,), generator=generator).to(backbone.device).split([7, 5])
    name = type(backbone.base_model).__name__
    attention = backbone.attention
    with torch.no_grad(), eval_mode(backbone), short_windows(backbone):
        # 1. Compare our logits of two documents with the model's own, by layers and an attention that we did not write.
        with attention_of_transformers(backbone), uncompiled(backbone), unfused(backbone):
            logits, error = backbone.unsharded(lambda: compare_logits(backbone, documents))
        if not all(torch.isfinite(of_document).all() for of_document in logits):
            raise ValueError(
                f"The logits of `{name}` are not finite: its weights are damaged, or they overflow in"
                f" {backbone.base_model.dtype}."
            )
        # Half precision rounds differently for other matrix shapes. The errors to be found (a missing scale, attention
        # across documents) are much larger. Logits may be in float32 although the layers compute in half precision.
        exact = is_exact(backbone) and logits[0].dtype in FULL_PRECISION
        max_error = 1e-3 if exact else 0.03
        if not error <= max_error:
            raise ValueError(
                f"`{name}` is not supported: logits computed from its hidden states differ from its own by {error:.2g}"
                " standard deviations, so it must transform them in some other way. Use another model."
            )
        with uncompiled(backbone):
            causal = is_causal(backbone, documents[0])
        if not causal:
            raise ValueError(
                f"`{name}` is not a causal LM: its hidden states depend on the tokens that follow, which it should"
                " predict. Use another model, or set `is_decoder: true` in `model_config` if it has this key."
            )
        # 2. Compare fused norms and compiled layers with the layers as written.
        tolerance = (0.01 if exact else 0.5) * max(1.0, logits[0].float().std().item())
        expected = gather_scores(logits, documents)
        if fused_norms(backbone):
            _check_fused(backbone, documents, tolerance)
        if is_compiled(backbone):
            _check_compiled(backbone, documents, tolerance)
        # 3. Find out how packed documents can be scored like single ones.
        difference = choose_masks(backbone, documents, expected, tolerance, exact=exact)
        if not difference <= tolerance:
            raise ValueError(
                f"The attention kernel '{attention}' is wrong on this machine: update it, or set"
                " `attn_implementation` to another one, such as sdpa or eager. Log-likelihoods differ by"
                f" {difference:.2g} nats."
            )
    backbone.checked_conditions = _conditions(backbone)


def _check_fused(backbone: Backbone, documents: Sequence[Tensor], tolerance: float) -> None:
    """Raise a ``ValueError`` if fused norms give other log-likelihoods than the norms as written."""
    with uncompiled(backbone):
        fused = score_alone(backbone, documents)
        with unfused(backbone):
            written = score_alone(backbone, documents)
    difference = (fused - written).abs().max().item()
    if not difference <= tolerance:  # also for NaN
        raise ValueError(
            "The fused norms are wrong on this machine: update torch, or set `fused_norms: false`. Log-likelihoods"
            f" differ by {difference:.2g} nats."
        )


def _check_compiled(backbone: Backbone, documents: Sequence[Tensor], tolerance: float) -> None:
    """Compare the log-likelihoods of compiled layers with those of the layers as written.

    With ``compile: auto``, layers that cannot be compiled, or are compiled wrongly, run as written from here on;
    otherwise, raise a ``ValueError``.
    """
    with uncompiled(backbone):
        written = score_alone(backbone, documents)
    try:
        difference = (score_alone(backbone, documents) - written).abs().max().item()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # from the compiler, for example because Triton is missing
        reason = " ".join(str(error).split("\n")[:2])  # the origin and the message
        problem = f"torch cannot compile the layers on this machine ({reason})"
    else:
        if difference <= tolerance:  # not for NaN
            return
        problem = f"The compiled layers are wrong on this machine (log-likelihoods differ by {difference:.2g} nats)"
    if backbone.needs_compiled:
        raise ValueError(f"{problem}: update torch, or remove `compile: true`.")
    _log.warning("%s, so they are not compiled.", problem)
    remove_compiled(backbone)


def _conditions(backbone: Backbone) -> tuple[Any, ...]:
    """Return the conditions that determine which kernels compute the scores."""
    device = backbone.device.type
    autocast = None
    if torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return backbone.device, backbone.base_model.dtype, autocast, backbone.attention, backbone.is_sharded


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
    batch = pack_sequence([torch.arange(length, device=backbone.device) % vocabulary_size(backbone)])
    devices = []
    if backbone.device.type == "cuda":
        devices.append(backbone.device)
    with torch.no_grad(), torch.random.fork_rng(devices):
        first, *others = (backbone.unsharded(partial(backbone.hidden_states, batch))[0].float() for _ in range(4))
    limit = 1e-4 if is_exact(backbone) else 0.01
    return any((states - first).abs().mean() > limit * first.abs().mean() for states in others)


def check_attention_window(backbone: Backbone, *, groups: bool = False) -> None:
    """Raise a ``ValueError`` unless the model's attention can be limited to a window, which some models ignore.

    With ``groups``, to groups of tokens (`sparse_arguments`).
    """
    layers = backbone.base_model.config.get_text_config(decoder=True).num_hidden_layers
    name = backbone.attention
    wrap_attention(name)  # a kernel of the hub may not be wrapped yet
    generator = torch.Generator().manual_seed(0)
    # Two texts with different first tokens. With a window or groups of 2, each layer reaches one token further back.
    ids = torch.randint(backbone.vocabulary_size, (layers + 3,), generator=generator).repeat(2, 1).to(backbone.device)
    ids[1, 0] = (ids[0, 0] + 1) % backbone.vocabulary_size
    with torch.no_grad(), eval_mode(backbone):
        limit = {"group" if groups else "window": 2}
        one = backbone(pack_sequence([ids[0], ids[0]]), **limit)
        other = backbone(pack_sequence([ids[1], ids[1]]), **limit)
        # The last token of each of the two documents.
        last = [ids.shape[1] - 1, 2 * ids.shape[1] - 1]
        limited = not backbone.is_stateful and torch.allclose(one[:, last], other[:, last], rtol=0, atol=1e-3)
    if not limited:
        option = "short_method: sliding_window"
        ignored = "window"
        remedy = "`short_method: windows`"
        if groups:
            option = "shifted_sparse_attention"
            ignored = "groups"
            remedy = "remove it"
        raise ValueError(
            f"`{option}` does not support `{type(backbone.base_model).__name__}` with '{name}' attention, which"
            f" ignores the {ignored}: set `attn_implementation` to sdpa, or {remedy}."
        )
