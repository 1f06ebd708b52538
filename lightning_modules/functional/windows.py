"""Sliding windows that give every token a short context (Appendix A.1)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch, check_boundaries, send
from lightning_modules.functional.checks import check_count


@dataclass(frozen=True)
class ShortContext:
    """Lengths that define a short context; the defaults are those of the paper (Appendix A.2).

    Attributes:
        context_length: Length K of the shortest short context, in tokens.
        stride: Number d of tokens that share one short window, and see K to K + d - 1 preceding tokens.

    Raises:
        ValueError: If a length is not an integer of 1 or more.
    """

    context_length: int = 4096
    stride: int = 1024

    def __post_init__(self) -> None:
        check_count("`context_length` (K)", self.context_length)
        check_count("`stride` (d)", self.stride)

    @property
    def window_length(self) -> int:
        """Tokens of a full window, K + d; from this token of a document on, one has a short context."""
        return self.context_length + self.stride

    def check_sequence(self, length: int) -> None:
        """Raise a ``ValueError`` for sequences in which every long-short difference would silently be 0."""
        if self.window_length >= length:
            raise ValueError(
                f"`context_length` + `stride` = {self.context_length} + {self.stride} = {self.window_length} must be"
                f" below the sequence length of {length} tokens, or no token has a longer context than the short one."
                " Lower them or use longer sequences."
            )


class Window(NamedTuple):
    """One short forward pass: feed tokens ``start .. stop - 1`` and score tokens ``scored .. stop - 1``."""

    start: int
    scored: int
    stop: int


class ShortScores(NamedTuple):
    """Log-likelihoods of a batch's tokens given their short contexts."""

    log_likelihood: Tensor  # [B, T] in nats, 0 for a token without a short context
    has_short_context: Tensor  # [B, T] bool

    def fill_missing(self, long: Tensor) -> Tensor:
        """Return ``[B, T]`` short log-likelihoods, equal to the long ones for tokens without a short context."""
        return torch.where(self.has_short_context, self.log_likelihood.to(long.dtype), long)


def short_context_windows(document_boundaries: Sequence[int], short_context: ShortContext) -> list[Window]:
    """Return windows in which each scored token sees K to K + d - 1 preceding tokens.

    Appendix A.1 of Fang et al. (2025), https://arxiv.org/abs/2410.23771, for each document separately. The first
    window of a document is omitted: its tokens see the same context in the long pass, so their long-short difference
    is 0 by definition.

    Args:
        document_boundaries: Ascending token indices ``[0, end of document 1, ..]`` of one sequence.
        short_context: K and d.

    Returns:
        Windows in ascending order; none for documents of K + d tokens or fewer. Each is K + d tokens long, except that
        the last one of a document may be shorter.

    Raises:
        ValueError: If the boundaries do not ascend.

    Example:
        >>> short_context_windows([0, 11], ShortContext(4, 3))
        [Window(start=3, scored=7, stop=10), Window(start=6, scored=10, stop=11)]
        >>> short_context_windows([0, 6, 15], ShortContext(4, 3))
        [Window(start=9, scored=13, stop=15)]
    """
    check_boundaries(document_boundaries)
    return [window for _, window in batch_windows([document_boundaries], short_context)]


def batch_windows(
    document_boundaries: Sequence[Sequence[int]], short_context: ShortContext
) -> list[tuple[int, Window]]:
    """Return the `short_context_windows` of all sequences of a batch, each with the row index of its sequence."""
    context_length = short_context.context_length
    stride = short_context.stride
    windows = []
    for row, boundaries in enumerate(document_boundaries):
        for begin, end in pairwise(boundaries):
            # Windows start every d tokens and score the d tokens after their first K; the last one of a document is
            # cut. From `stride` on: the window at `begin` sees the same context as the long pass.
            for start in range(begin + stride, end - context_length, stride):
                scored = start + context_length
                windows.append((row, Window(start, scored, min(scored + stride, end))))
    return windows


def trim_windows(windows: Sequence[tuple[int, Window]], wanted: Tensor) -> list[tuple[int, Window]]:
    """Shorten windows to end at the last wanted token that they score (``[B, T]``, on CPU); drop those without any."""
    trimmed = []
    for row, (start, scored, stop) in windows:
        tokens = wanted[row, scored:stop].nonzero()
        if len(tokens):
            trimmed.append((row, Window(start, scored, scored + int(tokens[-1]) + 1)))
    return trimmed


def window_batch(batch: PackedBatch, windows: Sequence[tuple[int, Window]]) -> PackedBatch:
    """Return a ``[W, longest window]`` batch with one sequence per window, in which only its own tokens are scored.

    Positions are taken from the sequence, minus the number of tokens of the document before the window: they restart at
    0, and skip where the sequence does. Distances between tokens are therefore the same as in the long context, and the
    short context differs only in the tokens that it lacks. Shorter windows are padded on the right, which causal
    attention never sees.
    """
    device = batch["input_ids"].device
    length = batch["input_ids"].shape[1]
    # Each is ``[W, 1]``, so that it broadcasts over the tokens of a window.
    row, start, scored, stop = torch.tensor([(row, *window) for row, window in windows]).unsqueeze(-1).unbind(1)
    width = int((stop - start).max())
    index = torch.arange(width)
    token = start + index  # [W, width]
    is_scored = (token >= scored) & (token < stop)
    is_inside = token < stop
    left_out = torch.tensor([_tokens_before(batch["document_boundaries"][row], window) for row, window in windows])
    # Padding after a row's last token repeats that token, because indexing needs valid places.
    token.clamp_(max=length - 1)
    place = send(row, device), send(token, device)
    positions = batch["position_ids"][place] - send(left_out[:, None], device)
    return PackedBatch(
        input_ids=batch["input_ids"][place],
        labels=batch["labels"][place].masked_fill(send(~is_scored, device), IGNORE_INDEX),
        # The positions of padding do not matter, but those of another document could be negative.
        position_ids=torch.where(send(is_inside, device), positions, torch.arange(width, device=device)),
        document_boundaries=[[0, window.stop - window.start] for _, window in windows],
        scored=batch["scored"][row.numpy(), token.numpy()] & is_scored.numpy(),
    )


def _tokens_before(document_boundaries: Sequence[int], window: Window) -> int:
    """Return the number of tokens of a window's document that are before the window."""
    return window.start - document_boundaries[bisect_right(document_boundaries, window.start) - 1]
