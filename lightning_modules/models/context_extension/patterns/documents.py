"""Attention that knows nothing of rows: each document of each row by itself, without its padding."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``[B, H, T, D]`` queries of the last T of S tokens, ``[B, H_kv, S, D]`` keys and values; ``[B, H, T, D]`` output."""


def by_document(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    borders: Sequence[Sequence[int]] | None,
) -> Tensor:
    """Causal attention of one kind or another within each document.

    Args:
        attention: Of one document.
        query: ``[B, H, T, D]``.
        key: ``[B, H_kv, S, D]``, where S is above T if a cache holds what stands before.
        value: ``[B, H_kv, S, D]``.
        mask: ``[B, 1, T, S]`` that transformers made of padding; None without padding.
        borders: For each row ascending indices ``[0, .., T]``; one document per row when None.

    Returns:
        ``[B, H, T, D]``, 0 for padding that a mask shuts out.

    Raises:
        ValueError: If a mask holds more than causal attention and padding: a sliding window, or packed documents.
    """
    if mask is None and borders is None:
        if 1 < query.shape[2] < key.shape[2]:  # an empty static cache: the rest of it is not filled yet
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        return attention(query, key, value)
    rows = []
    for row in range(len(query)):
        q, k, v = (part[row : row + 1] for part in (query, key, value))
        if mask is not None:
            rows.append(_padded(attention, q, k, v, mask[row % len(mask), 0]))
        elif borders is not None:
            parts = [attention(*(x[:, :, start:stop] for x in (q, k, v))) for start, stop in pairwise(borders[row])]
            rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def _padded(attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of one row that is padded as its ``[T, S]`` mask says."""
    (tokens, keys), device = mask.shape, mask.device
    seen = mask[-1].nonzero() if mask.dtype == torch.bool else mask.new_empty(0)
    first, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
    # With a cache the last query is the last token; without one it may be padding behind it.
    shift = 0 if tokens == keys else end - tokens
    own = torch.arange(keys, device=device)
    low, high = max(first - shift, 0), end - shift  # queries that are tokens
    causal = (own >= first) & (own < end) & (own <= own[:tokens, None] + shift)
    if first == end or shift < 0 or not torch.equal(mask, causal):
        raise ValueError(
            "The attention pattern of this model follows no mask but that of padding, and was given another one. If"
            " the model has sliding windows, set `context_extension.full_attention: true`; if its rows hold several"
            " documents, say so by `document_borders` and the attention 'document_sdpa'."
        )
    output = attention(query[:, :, low:high], key[:, :, first:end], value[:, :, first:end])
    return F.pad(output, (0, 0, low, tokens - high))
