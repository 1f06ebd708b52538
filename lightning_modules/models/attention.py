"""Attention that stops at document boundaries, for sequences of several documents."""

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
"""Attention for sequences that are sharded across processes: `SequenceGroup.attend`."""

DOCUMENT_SDPA = "document_sdpa"
"""Name under which torch's scaled dot product attention, one document at a time, is registered."""


class _MaskFree:
    """Whether boundaries replace masks. Not a context variable, because torch.compile cannot trace those."""

    enabled = False


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
    """Compute causal attention within each document of each sequence, without a mask.

    A block-diagonal mask for a sequence of 32k tokens takes 1 GiB and rules out the flash kernel. Causal attention for
    one document after another needs no mask. A mask from transformers (padding, sliding window) already separates the
    documents.

    Returns ``[B, T, H, D]`` for ``[B, H, T, D]`` queries, and None for the attention weights. ``document_boundaries``
    are ascending indices ``[0, .., T]`` of each sequence, or None if each is one document. ``exchange`` calls this
    function for whole sequences of which this process holds a shard; it does not support masks.
    """
    if exchange is not None:
        if attention_mask is not None:
            raise ValueError(
                f"Sequence parallelism does not support `{type(module).__name__}`, which needs an attention mask: set"
                " `sequence_parallel_size: 1`."
            )
        return exchange(module, query, key, value, document_boundaries=document_boundaries, **kwargs)
    if document_boundaries is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for row, boundaries in enumerate(document_boundaries):
        documents = [
            sdpa_attention_forward(
                module, *(states[row : row + 1, :, start:stop] for states in (query, key, value)), None, **kwargs
            )[0]
            for start, stop in pairwise(boundaries)
        ]
        outputs.append(torch.cat(documents, dim=1))
    return torch.cat(outputs), None


@contextlib.contextmanager
def boundaries_only() -> Iterator[None]:
    """Let `document_attention` separate documents by their boundaries only, without a mask."""
    before, _MaskFree.enabled = _MaskFree.enabled, True
    try:
        yield
    finally:
        _MaskFree.enabled = before


def document_mask(**kwargs: Any) -> Tensor | None:
    """Return the mask for `document_attention`: None for plain causal attention, and always in `boundaries_only`.

    Otherwise transformers decides: documents that it recognizes by restarting positions, or the empty end of a static
    cache, need a mask.
    """
    return sdpa_mask(**(kwargs | {"allow_is_causal_skip": True} if _MaskFree.enabled else kwargs))


def register_document_attention() -> str:
    """Register ``document_sdpa`` with transformers and return that name."""
    if DOCUMENT_SDPA not in AttentionInterface():  # keep a wrapper that may be around it
        AttentionInterface.register(DOCUMENT_SDPA, document_attention)
    AttentionMaskInterface.register(DOCUMENT_SDPA, document_mask)
    return DOCUMENT_SDPA


def index_free_length(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence in which attention does not depend on token indices, or None without a limit.

    Llama 4 has layers with chunked attention, and others that scale queries in steps of ``floor_scale`` tokens. Both
    count from the start of the sequence, not by positions: in a longer sequence a second document would be scored as
    if it continued the first.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type != "llama4_text":
        return None
    limits = (config.attention_chunk_size, config.floor_scale - 1 if config.attn_temperature_tuning else None)
    return min((limit for limit in limits if limit is not None), default=None)


def isolation_arguments(
    implementation: str, document_boundaries: Sequence[Sequence[int]], sequence_length: int, device: torch.device
) -> dict[str, Any]:
    """Return keyword arguments for a decoder that isolate the documents of a sequence; none for single documents.

    Implementations other than ours and flash attention need none: transformers recognizes documents by positions that
    restart, if it gets neither a mask nor a cache and the model respects its masks (see `check_scoring`).
    ``document_boundaries`` are ``[0, end of document 1, ..]`` of each sequence; padding may follow.
    """
    if all(len(boundaries) <= 2 for boundaries in document_boundaries):
        return {}
    # Padding after the last boundary becomes a document by itself, whose output is unused.
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
