"""Attention that stops at document boundaries, for rows that hold several documents."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

Exchange = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention of rows whose tokens are sharded over processes: `SequenceGroup.attend`."""

DOCUMENT_SDPA = "document_sdpa"
"""Our name for torch's scaled dot product attention, one document at a time."""


class _Borders:
    """Whether `document_attention` gets all boundaries; no context variable, which torch.compile cannot trace."""

    given = False


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    document_boundaries: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute causal attention within each document of each row, exact and without a mask.

    A block-diagonal mask of a row of 32k tokens takes 1 GiB and excludes the flash kernel; causal attention of one
    document after another needs no mask. A mask that transformers made (padding, sliding window) includes the
    documents.

    Returns ``[B, T, H, D]`` for ``[B, H, T, D]`` queries, and None for the attention weights. ``document_boundaries``
    are ascending indices ``[0, .., T]`` of each row; None is one document per row. ``exchange`` computes this function
    for whole rows, of which this process holds some tokens; it takes no mask.
    """
    if exchange is not None:
        if attention_mask is not None:
            raise ValueError(
                f"`{type(module).__name__}` needs a mask, which is of this process's part of the row only: processes"
                " cannot share the rows of this model."
            )
        return exchange(module, query, key, value, document_boundaries=document_boundaries, **kwargs)
    if document_boundaries is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = []
    for row, boundaries in enumerate(document_boundaries):
        documents = [
            sdpa_attention_forward(
                module, *(part[row : row + 1, :, start:stop] for part in (query, key, value)), None, **kwargs
            )[0]
            for start, stop in pairwise(boundaries)
        ]
        rows.append(torch.cat(documents, dim=1))
    return torch.cat(rows), None


@contextlib.contextmanager
def borders_given() -> Iterator[None]:
    """Let `document_attention` separate documents by their boundaries alone, without a mask."""
    before, _Borders.given = _Borders.given, True
    try:
        yield
    finally:
        _Borders.given = before


def document_mask(**kwargs: Any) -> Tensor | None:
    """Return the mask for `document_attention`: None for plain causal rows, and for any documents in `borders_given`.

    Elsewhere transformers decides: documents that it finds by positions that restart, or the empty end of a static
    cache, need a mask.
    """
    return sdpa_mask(**(kwargs | {"allow_is_causal_skip": True} if _Borders.given else kwargs))


def register_document_attention() -> str:
    """Register ``document_sdpa`` with transformers and return that name."""
    if DOCUMENT_SDPA not in AttentionInterface():  # or a wrapper around it would be lost
        AttentionInterface.register(DOCUMENT_SDPA, document_attention)
    AttentionMaskInterface.register(DOCUMENT_SDPA, document_mask)
    return DOCUMENT_SDPA


def index_free_length(config: PreTrainedConfig) -> int | None:
    """Return the longest row in which attention does not depend on a token's index in the row; None if it never does.

    Llama 4 has layers that see no token before the start of a chunk, and others that scale queries in steps of
    ``floor_scale`` tokens. Both count from the start of the row, whatever the positions are: in a longer row a second
    document would be scored as if it continued the first.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type != "llama4_text":
        return None
    limits = (config.attention_chunk_size, config.floor_scale - 1 if config.attn_temperature_tuning else None)
    return min((limit for limit in limits if limit is not None), default=None)


def isolation_arguments(
    implementation: str, document_boundaries: Sequence[Sequence[int]], sequence_length: int, device: torch.device
) -> dict[str, Any]:
    """Return keyword arguments for a decoder that keep the documents of a row apart; none if each row is one document.

    Implementations other than ours and flash attention need none: transformers reads the boundaries from positions that
    restart, as long as neither a mask nor a cache is given and the model follows its masks (see `check_scoring`).
    ``document_boundaries`` are ``[0, end of document 1, ..]`` of each row; padding may follow.
    """
    if all(len(boundaries) <= 2 for boundaries in document_boundaries):
        return {}
    # Padding after the last boundary is a separate piece, whose output is unused.
    covered = [
        [*boundaries, *([sequence_length] if boundaries[-1] < sequence_length else [])]
        for boundaries in document_boundaries
    ]
    if implementation == DOCUMENT_SDPA:
        return {"document_boundaries": covered}
    if not implementation.startswith("flash_attention"):
        return {}
    flat = [0] + [row * sequence_length + stop for row, boundaries in enumerate(covered) for stop in boundaries[1:]]
    cumulative = torch.tensor(flat, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(flat))
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }
