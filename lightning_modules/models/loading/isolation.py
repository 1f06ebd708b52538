"""Choose how packed documents share a forward pass, by comparing them with each document alone."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_modules.batch import pack_sequence
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.probes import (
    FULL_PRECISION,
    are_equal,
    attention_of_transformers,
    compare_logits,
    gather_scores,
    largest_error,
    other_tokens,
    score_packed,
)

log = logging.getLogger(__name__)


def choose_masks(
    backbone: Backbone, documents: Sequence[Tensor], expected: Tensor, tolerance: float, *, exact: bool
) -> float:
    """Separate documents by our attention, by the masks of transformers, or by separate passes, in this order.

    Returns the largest error of single documents, in nats, with our attention, an external kernel or those masks.
    """
    attention = backbone.attention
    difference = largest_error(backbone, documents, expected)
    is_right = difference <= tolerance  # False for NaN
    isolates = is_right and _isolates(backbone, documents, expected, tolerance, exact=exact)
    if attention == DOCUMENT_SDPA and not (isolates or (is_right and backbone.is_stateful)):
        backbone.base_model.set_attn_implementation("sdpa")
        with_masks = largest_error(backbone, documents, expected)
        isolates = with_masks <= tolerance and _isolates(backbone, documents, expected, tolerance, exact=exact)
        if isolates or not is_right:
            log.warning("`%s` needs the attention masks of transformers.", type(backbone.base_model).__name__)
            difference = with_masks
        else:  # masks do not separate its documents either
            backbone.base_model.set_attn_implementation(attention)
    backbone.isolates_documents = isolates and _isolates_in_full_precision(backbone, documents)
    return difference


def _isolates(
    backbone: Backbone, documents: Sequence[Tensor], expected: Tensor, tolerance: float, *, exact: bool
) -> bool:
    """Return whether documents in one forward pass have the expected scores, and do not attend to each other."""
    if backbone.is_stateful:
        return False
    # Score all documents in one pass, regardless of earlier decisions.
    backbone.isolates_documents = True
    errors = (score_packed(backbone, documents) - expected).abs()
    # Half precision may choose another expert for a token. Such errors are as large as others, but affect few tokens.
    if not (errors.max() <= tolerance and (exact or errors.mean() <= 0.16 * tolerance)):
        return False
    # In a model that is not trained yet, scores hardly depend on the context, but hidden states do.
    first, second = documents
    one = _hidden_states(backbone, [first, second])
    other = _hidden_states(backbone, [other_tokens(backbone, first), second])
    return are_equal(backbone, one[len(first) :], other[len(first) :])


def _isolates_in_full_precision(backbone: Backbone, documents: Sequence[Tensor]) -> bool:
    """Return the result of `_isolates` without autocast, whose rounding hides small leaks; True if autocast is off."""
    device = backbone.device.type
    if not torch.is_autocast_enabled(device) or backbone.base_model.dtype not in FULL_PRECISION:
        return True
    if "flash" in backbone.attention:  # it supports half precision only
        return True
    with torch.autocast(device, enabled=False):
        with attention_of_transformers(backbone):
            logits, _ = backbone.unsharded(lambda: compare_logits(backbone, documents))
        tolerance = 0.01 * max(1.0, logits[0].float().std().item())
        return _isolates(backbone, documents, gather_scores(logits, documents), tolerance, exact=True)


def is_causal(backbone: Backbone, document: Tensor) -> bool:
    """Return whether the other hidden states of a document stay the same if its last token changes."""
    last = len(document) - 1
    other = torch.cat([document[:last], other_tokens(backbone, document[last:])])
    return are_equal(backbone, _hidden_states(backbone, [document])[:last], _hidden_states(backbone, [other])[:last])


def _hidden_states(backbone: Backbone, documents: Sequence[Tensor]) -> Tensor:
    """Return the ``[T, D]`` hidden states of documents that are packed into one sequence."""
    batch = pack_sequence(documents)
    return backbone.unsharded(partial(backbone.hidden_states, batch))[0]
