"""Attention that stops at document boundaries, for sequences of several documents."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lightning_modules.batch import send


class Boundaries(Sequence[Sequence[int]]):
    """Document boundaries of several sequences. torch.compile would compile again for each length of a plain list.

    On a GPU, there are ``packed_lengths``: boundaries of all documents of the batch and the longest length, for one
    attention call for all.
    """

    def __init__(self, rows: Sequence[Sequence[int]], packed_lengths: tuple[Tensor, int] | None = None) -> None:
        self._rows = rows
        self.packed_lengths = packed_lengths

    def __getitem__(self, index: Any) -> Any:
        """Return the boundaries of a sequence."""
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)


Exchange = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention for sequences that are sharded across processes (`SequenceGroup.attend`), or `attend_in_halves`."""


DOCUMENT_SDPA = "document_sdpa"
"""Name under which torch's scaled dot product attention, one document at a time, is registered."""


class _ForwardPass(threading.local):
    """The pass of `documents_by_boundaries` that is open in this thread."""

    position_ids: Tensor | None = None


_forward_pass = _ForwardPass()

_find_packed_sequences = masking_utils.find_packed_sequence_indices
_window_function = masking_utils.sliding_window_causal_mask_function


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    document_boundaries: Sequence[Sequence[int]] | None = None,
    exchange: Exchange | None = None,
    attention_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute causal attention within each document of each sequence, without a mask.

    A block-diagonal mask for a sequence of 32k tokens takes 1 GiB and rules out the flash kernel. Causal attention for
    one document after another needs no mask, nor does a layer with a sliding window (`document_mask`). Other masks of
    transformers already separate the documents.

    Returns ``[B, T, H, D]`` for ``[B, H, T, D]`` queries, and None for the attention weights. ``document_boundaries``
    are ascending indices ``[0, .., T]`` of each sequence, or None if each is one document. ``exchange`` calls this
    function again, for whole sequences of which this process holds a shard or for halves of the heads, and does not
    support masks. An ``attention_window`` limits all layers, including those with a mask.
    """
    # 1. The mask of a layer with a window has no rows (`document_mask`), and its width is the window.
    if attention_mask is not None and attention_mask.shape[-2] == 0:
        window = attention_mask.shape[-1]
        attention_window = min(window, attention_window or window)
        attention_mask = None
    # 2. Ulysses calls this function again for whole sequences, shifted sparse attention for each half of the heads.
    if exchange is not None:
        if attention_mask is not None:
            raise ValueError(
                f"Sequence parallelism and shifted sparse attention do not support `{type(module).__name__}`, which"
                " needs an attention mask: set `sequence_parallel_size: 1`, and remove `shifted_sparse_attention`."
            )
        limits = {"document_boundaries": document_boundaries, "attention_window": attention_window}
        return exchange(module, query, key, value, **limits, **kwargs)
    # 3. A mask of transformers already separates the documents.
    if attention_mask is not None:
        mask = _limit_mask(attention_mask, attention_window)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    # Without boundaries, each sequence is one document.
    if document_boundaries is None:
        return _attend_single_documents(attention_window, module, query, key, value, **kwargs)
    # 4. All documents of the batch by one call, on a GPU.
    packed_lengths = getattr(document_boundaries, "packed_lengths", None)
    if packed_lengths is not None:
        output = _attend_at_once(query, key, value, *packed_lengths, window=attention_window, **kwargs)
        if output is not None:
            return output, None
    # 5. Otherwise one document after another: causal attention of a slice needs no mask.
    attend = partial(_attend_in_window, attention_window)
    outputs = [
        _attend_one_by_one(attend, module, (query, key, value), row, boundaries, **kwargs)
        for row, boundaries in enumerate(document_boundaries)
    ]
    return torch.cat(outputs), None


def _attend_single_documents(
    window: int | None, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return ``[B, T, H, D]`` attention of sequences that are one document each, in a window if there is one."""
    rows, tokens = len(query), query.shape[2]
    if window is not None and tokens > window and query.device.type == "cuda":
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * tokens
        output = _attend_at_once(query, key, value, bounds, tokens, window=window, **kwargs)
        if output is not None:
            return output, None
    return _attend_in_window(window, module, query, key, value, None, **kwargs)


def _attend_one_by_one(
    attend: Callable[..., Any],
    module: nn.Module,
    states: Sequence[Tensor],
    row: int,
    boundaries: Sequence[int],
    **kwargs: Any,
) -> Tensor:
    """Return the ``[1, T, H, D]`` attention of a sequence, with one call for each of its documents."""
    documents = []
    for start, stop in pairwise(boundaries):
        query, key, value = (each[row : row + 1, :, start:stop] for each in states)
        documents.append(attend(module, query, key, value, None, **kwargs)[0])
    return torch.cat(documents, dim=1)


def _attend_in_window(
    window: int | None, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return ``[B, T, H, D]`` attention of documents of one length, for one block of queries and its keys at a time."""
    tokens = query.shape[2]
    outputs = []
    if window is None or tokens <= window:  # only later tokens are hidden: plain causal attention, without a mask
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)
    for first, start, stop in _blocks(tokens, window):
        # Indices on the device, because the CPU would wait for a copy.
        index = torch.arange(first, stop, device=query.device)
        mask = _visible(index[start - first :], index, window)[None, None]
        keys = key[:, :, first:stop]
        values = value[:, :, first:stop]
        outputs.append(sdpa_attention_forward(module, query[:, :, start:stop], keys, values, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def _blocks(tokens: int, window: int) -> list[tuple[int, int, int]]:
    """Return blocks of queries from ``start`` and the keys that they may see from ``first``; both end at ``stop``."""
    # A block has keys for its first query that its last one does not see: half a window wastes a third of the products.
    size = max(window // 2, 64)
    return [(max(at - window + 1, 0), at, min(at + size, tokens)) for at in range(0, tokens, size)]


def _limit_mask(mask: Tensor, window: int | None) -> Tensor:
    """Return a mask that also hides tokens outside of a window."""
    if window is None:
        return mask
    # Indices instead of positions are right here: distances inside a document are the same.
    index = torch.arange(mask.shape[-1], device=mask.device)
    return mask & _visible(index, index, window)


def _visible(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return ``[Q, K]`` bool: whether a window and causality let the query at an index see the key at an index."""
    # ``[Q, K]``; a negative distance is a later token.
    distance = queries[:, None] - keys
    return (distance >= 0) & (distance < window)


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    window: int | None,
    **kwargs: Any,
) -> Tensor | None:
    """Return attention within all documents by one call, or None if torch's flash attention does not support it."""
    # Returning None lets the caller compute one document after another.
    device = query.device.type
    if torch.is_autocast_enabled(device):  # it does not know this function
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    has_groups = query.shape[1] != key.shape[1]
    # Without it torch would fall back to a kernel that computes, and stores, all pairs of tokens of all documents.
    supported = can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, has_groups))
    if not supported or query.shape[-1] % 8 or kwargs.get("dropout") or kwargs.get("position_bias") is not None:
        return None
    from torch.nn.attention.varlen import varlen_attn  # takes a second to import

    attend: Any = varlen_attn
    # torch 2.11 supports fewer keys than queries without being told.
    groups = {"enable_gqa": has_groups} if "enable_gqa" in inspect.signature(attend).parameters else {}
    # ``[B, H, T, D]`` to ``[B * T, H, D]``: one long sequence, in which ``bounds`` separate the documents.
    flat = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    # The kernel counts the tokens before the query, without the query itself.
    before = -1 if window is None else window - 1
    sizes = (bounds, bounds, longest, longest)
    output = attend(*flat, *sizes, scale=kwargs.get("scaling"), window_size=(before, 0), **groups)
    return torch.unflatten(output, 0, (query.shape[0], query.shape[2]))


@contextlib.contextmanager
def documents_by_boundaries(implementation: str, position_ids: Tensor) -> Iterator[None]:
    """Separate documents by their boundaries, and not by masks of transformers, during a forward pass.

    This concerns `document_attention` and flash attention. ``position_ids`` are ``[B, T]`` and restart in documents.
    """
    if implementation != DOCUMENT_SDPA and "flash" not in implementation:
        yield
        return
    # For each mask, transformers asks whether the positions restart, for which the CPU waits. Also, a mask that
    # separates documents is never skipped, so it would hide whether the model itself needs one.
    masking_utils.find_packed_sequence_indices = _find_undivided_documents
    masking_utils.sliding_window_causal_mask_function = _mark_window
    _forward_pass.position_ids = position_ids
    try:
        yield
    finally:
        _forward_pass.position_ids = None


def _find_undivided_documents(position_ids: Tensor) -> Tensor | None:
    return None if _forward_pass.position_ids is not None else _find_packed_sequences(position_ids)


def _mark_window(sliding_window: int) -> Callable[..., Any]:
    """Return the mask function of a causal window, with the window as its attribute."""
    function: Any = _window_function(sliding_window)
    function.window = sliding_window
    return function


def document_mask(*, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Tensor | None:
    """Return the mask for `document_attention`: None for plain causal attention, unless the model always needs a mask.

    In `documents_by_boundaries`, a sliding window is the width of a mask without rows, ``[1, 1, 0, W]``: the whole mask
    would take a GiB for 32k tokens. Any other mask (chunks, for example) also separates the documents, whether or not
    the model passes the positions by which transformers would do it.
    """
    positions = _forward_pass.position_ids
    # A mask of another shape belongs to a layer that shortens the sequence; `check_scoring` detects whether it leaks.
    if positions is not None and kwargs["q_length"] == kwargs["kv_length"] == positions.shape[1]:
        window = getattr(mask_function, "window", None)
        # The mask hides and shows no other tokens, and only attention uses it.
        if window is not None and kwargs.get("allow_is_causal_skip") and kwargs.get("attention_mask") is None:
            return positions.new_empty(1, 1, 0, window, dtype=torch.bool)
        documents = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        mask_function = _within_documents(mask_function, documents, positions)
    return sdpa_mask(mask_function=mask_function, **kwargs)


def _within_documents(mask_function: Callable[..., Any], documents: Tensor, positions: Tensor) -> Callable[..., Any]:
    """Return a mask function that hides other documents, and counts chunks and windows from a document's first token.

    transformers has the same from 5.17 on.
    """

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = mask_function(row, head, positions[row, query], positions[row, key])
        return visible & (documents[row, query] == documents[row, key])

    return is_visible


def register_document_attention() -> str:
    """Register ``document_sdpa`` with transformers and return that name."""
    if DOCUMENT_SDPA not in AttentionInterface():  # keep a wrapper that may be around it
        AttentionInterface.register(DOCUMENT_SDPA, document_attention)
    AttentionMaskInterface.register(DOCUMENT_SDPA, document_mask)
    return DOCUMENT_SDPA


def isolation_arguments(
    implementation: str,
    document_boundaries: Sequence[Sequence[int]],
    sequence_length: int,
    device: torch.device,
    window: int | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for a decoder that isolate the documents of a sequence; none for single documents.

    Flash attention always gets them; otherwise each layer would compare positions, and the CPU would wait for the
    result. Other implementations except ours do not need them: transformers recognizes documents by positions that
    restart, if it gets neither a mask nor a cache and the model respects its masks (see `check_scoring`).
    ``document_boundaries`` are ``[0, end of document 1, ..]`` of each sequence; padding may follow.
    """
    is_flash = "flash" in implementation  # also a kernel of the hub
    # Single documents without a window are plain causal attention, which needs no arguments.
    packed = window is not None or any(len(boundaries) > 2 for boundaries in document_boundaries)
    if not is_flash and not (packed and implementation == DOCUMENT_SDPA):
        if window is not None:
            raise ValueError(
                f"'{implementation}' attention ignores the window of `short_method: sliding_window`: set"
                " `attn_implementation` to sdpa, or `short_method: windows`."
            )
        return {}
    # Lists of ends become one list over the whole batch, which flash attention reads from the accelerator.
    limits = {} if window is None else {"attention_window": window}
    # Padding after the last boundary becomes a separate document, whose output is unused.
    covered = [
        [*boundaries, *([sequence_length] if boundaries[-1] < sequence_length else [])]
        for boundaries in document_boundaries
    ]
    # Attention sees whole sequences, although each process may hold a shard of ``sequence_length`` of their tokens.
    flat = [0]
    for row in covered:
        before = flat[-1]
        flat += [before + stop for stop in row[1:]]
    cumulative = send(torch.tensor(flat, dtype=torch.int32), device)
    longest = max(stop - start for start, stop in pairwise(flat))
    if is_flash:
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, **lengths, **limits}
    boundaries = Boundaries(covered, (cumulative, longest) if device.type == "cuda" else None)
    return {"document_boundaries": boundaries, **limits}


def attend_in_halves(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_boundaries: Sequence[Sequence[int]] | None = None,
    shifted_boundaries: Sequence[Sequence[int]] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute `document_attention`, in the second half of the heads with ``shifted_boundaries``."""
    halves = zip(query.chunk(2, dim=1), key.chunk(2, dim=1), value.chunk(2, dim=1), strict=True)
    outputs = []
    for states, boundaries in zip(halves, (document_boundaries, shifted_boundaries), strict=True):
        outputs.append(document_attention(module, *states, None, boundaries, **kwargs)[0])
    return torch.cat(outputs, dim=2), None  # [B, T, H, D]


def sparse_arguments(
    document_boundaries: Sequence[Sequence[int]], sequence_length: int, device: torch.device, group: int
) -> dict[str, Any]:
    """Return keyword arguments for a decoder with shifted sparse attention, which only `document_attention` supports.

    Attention stays inside groups of ``group`` tokens, counted from the first token of a document; in the second half of
    the heads, groups are shifted by half of their length, and the first one has only half of it.

    S²-Attn of LongLoRA (Chen et al., 2024, https://arxiv.org/abs/2309.12307), Section 3.2, without tokens that see the
    end of the document in the group that would wrap around.
    """
    arguments: dict[str, Any] = {"exchange": attend_in_halves}
    for name, first in (("document_boundaries", group), ("shifted_boundaries", group // 2)):
        groups = [_cut_documents(boundaries, first, group) for boundaries in document_boundaries]
        isolated = isolation_arguments(DOCUMENT_SDPA, groups, sequence_length, device)
        # Without boundaries, each sequence has one group, and plain causal attention.
        if isolated:
            arguments[name] = isolated["document_boundaries"]
    return arguments


def _cut_documents(boundaries: Sequence[int], first: int, group: int) -> list[int]:
    """Return the boundaries of groups: ``first`` tokens of each document, then ``group`` tokens each."""
    groups = [0]
    for start, stop in pairwise(boundaries):
        groups += [*range(start + first, stop, group), stop]
    return groups
