"""Attention that stops at document borders, for rows that hold several documents."""

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
"""Attention of rows whose tokens are shared out among processes: `SequenceGroup.attend`."""

DOCUMENT_SDPA = "document_sdpa"
"""Our name for torch's scaled dot product attention, one document at a time."""


class _Borders:
    """Whether `document_attention` is told of all documents; no context variable, which torch.compile cannot trace."""

    given = False


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    document_borders: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention within each document of each row, exact and without a mask.

    A block-diagonal mask of a row of 32k tokens takes 1 GiB and shuts out the flash kernel; causal attention of one
    document after another needs neither.

    Args:
        module: The attention layer.
        query: ``[B, H, T, D]``.
        key: ``[B, H_kv, T, D]``.
        value: ``[B, H_kv, T, D]``.
        attention_mask: A mask that transformers made (padding, sliding window); it knows the documents already.
        document_borders: For each row ascending indices ``[0, .., T]``; one document per row when None.
        exchange: Computes this function for whole rows, of which this process holds a part of the tokens.
        **kwargs: As transformers passes them on.

    Returns:
        ``[B, T, H, D]`` attention output, and None for the attention weights.

    Raises:
        ValueError: If there is a mask and this process holds a part of the rows only.
    """
    if exchange is not None:
        if attention_mask is not None:
            raise ValueError(
                f"`{type(module).__name__}` needs a mask, which is of this process's part of the row only: processes"
                " cannot share the rows of this model."
            )
        return exchange(module, query, key, value, document_borders=document_borders, **kwargs)
    if document_borders is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = []
    for row, borders in enumerate(document_borders):
        documents = [
            sdpa_attention_forward(
                module, *(part[row : row + 1, :, start:stop] for part in (query, key, value)), None, **kwargs
            )[0]
            for start, stop in pairwise(borders)
        ]
        rows.append(torch.cat(documents, dim=1))
    return torch.cat(rows), None


@contextlib.contextmanager
def borders_given() -> Iterator[None]:
    """Within, `document_attention` is told of all documents by their borders, and needs no mask to keep them apart."""
    before, _Borders.given = _Borders.given, True
    try:
        yield
    finally:
        _Borders.given = before


def document_mask(**kwargs: Any) -> Tensor | None:
    """The mask for `document_attention`.

    None for plain causal rows, within `borders_given` however many documents they hold. Elsewhere transformers decides:
    documents that it finds by positions that restart, or the empty end of a static cache, need a mask.
    """
    return sdpa_mask(**(kwargs | {"allow_is_causal_skip": True} if _Borders.given else kwargs))


def register_document_attention() -> str:
    """Make ``document_sdpa`` known to transformers and return that name."""
    if DOCUMENT_SDPA not in AttentionInterface():  # or a wrapper around it would be lost
        AttentionInterface.register(DOCUMENT_SDPA, document_attention)
    AttentionMaskInterface.register(DOCUMENT_SDPA, document_mask)
    return DOCUMENT_SDPA


def index_free_length(config: PreTrainedConfig) -> int | None:
    """Return the longest row in which attention does not depend on a token's index in the row; None if it never does.

    Llama 4 has layers that see no token before the start of a chunk, and others that scale queries in steps of
    ``floor_scale`` tokens. Both count from the start of the row, whatever the positions are: in a longer row a second
    document would be scored as if it went on from the first.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type != "llama4_text":
        return None
    limits = (config.attention_chunk_size, config.floor_scale - 1 if config.attn_temperature_tuning else None)
    return min((limit for limit in limits if limit is not None), default=None)


def isolation_arguments(
    implementation: str, document_borders: Sequence[Sequence[int]], sequence_length: int, device: torch.device
) -> dict[str, Any]:
    """Keyword arguments for a decoder that keep the documents of a row apart.

    Others than ours and flash attention need none: transformers reads the borders from positions that restart, as long
    as neither a mask nor a cache is given and the model follows its masks, which `Backbone.check_scoring` tries out.

    Args:
        implementation: The model's attention implementation.
        document_borders: For each row ``[0, end of document 1, ..]``; padding may follow.
        sequence_length: Length ``T`` of the rows, in tokens.
        device: Where the model runs.

    Returns:
        Empty when every row holds one document.
    """
    if all(len(borders) <= 2 for borders in document_borders):
        return {}
    # What stands behind the last border is padding: a piece of its own, which nobody reads.
    covered = [
        [*borders, *([sequence_length] if borders[-1] < sequence_length else [])] for borders in document_borders
    ]
    if implementation == DOCUMENT_SDPA:
        return {"document_borders": covered}
    if not implementation.startswith("flash_attention"):
        return {}
    flat = [0] + [row * sequence_length + stop for row, borders in enumerate(covered) for stop in borders[1:]]
    cumulative = torch.tensor(flat, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(flat))
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }
