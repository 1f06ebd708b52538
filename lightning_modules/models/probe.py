"""Before any number is trusted: our scores of a dozen tokens against the model's own logits."""

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.head_kernels import check_kernel
from lightning_modules.models.attention import DOCUMENT_SDPA
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations.modes import eval_mode

log = logging.getLogger(__name__)


def check_scoring(backbone: Backbone) -> None:
    """Compare our scores of a dozen tokens with the model's own logits, document by document and packed in a row.

    What a model does not bear is switched off: a model that cannot keep our documents apart gets transformers' own
    masks, and if those do not help either, it is only refused rows that hold several; a last layer that cannot leave
    out the tokens that nobody reads works on all.

    Raises:
        ValueError: If they disagree: the model does something to its logits or positions that is not known here, and
            every number would be wrong. If the head kernel is missing, wrong, or unfit for the head.
    """
    if backbone.head_kernel != "chunked":
        backbone.within(lambda: check_kernel(backbone.head_kernel, backbone.linear_head()))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.vocabulary_size, (12,), generator=generator).to(backbone.device)
    documents = tokens.split([7, 5])
    name = type(backbone.base_model).__name__
    with torch.no_grad(), eval_mode(backbone):
        logits, error = backbone.within(lambda: _compare(backbone, documents))
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
    row = _row(documents)
    return backbone(row)[row["labels"] != IGNORE_INDEX]


def _trims(backbone: Backbone, document: Tensor, tolerance: float) -> bool:
    """Whether the last layer gives the same for the last tokens if it works on them only."""
    row = _row([document])
    start = len(document) // 2 + 1
    backbone.trims_last_layer = True
    try:
        trimmed = backbone(row, first_scored=start)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever such a layer may say: its parts do not work on each token by itself
        log.info("The last layer of %s works on all tokens: %r", type(backbone.base_model).__name__, error)
        return False
    backbone.trims_last_layer = False
    return bool((trimmed - backbone(row))[:, start:].abs().max() <= tolerance)


def _row(documents: Sequence[Tensor]) -> PackedBatch:
    tokens = torch.cat(list(documents)).unsqueeze(0)
    borders = [0, *itertools.accumulate(map(len, documents))]
    labels = tokens.clone()
    labels[:, borders[:-1]] = IGNORE_INDEX
    positions = torch.cat([torch.arange(len(document)) for document in documents]).unsqueeze(0).to(tokens.device)
    return PackedBatch(input_ids=tokens, labels=labels, position_ids=positions, document_borders=[borders])
