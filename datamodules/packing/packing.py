"""Pack documents of any length into sequences of equal length (rows), by arithmetic on token indices."""

import logging
from bisect import bisect_left, insort
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray

from datamodules.number_types import LongDocumentWeight

_log = logging.getLogger(__name__)

Packing = Literal["chunk", "concat", "best_fit"]


@dataclass(frozen=True)
class PackedRows:
    """Table of packed sequences: the segments of the token stream in each row, to be padded to ``sequence_length``.

    Row ``r`` is ``segments[row_boundaries[r] : row_boundaries[r + 1]]``. A segment lies within one document.
    """

    segments: NDArray[np.int64]  # [s, 2] start and stop in the token stream
    row_boundaries: NDArray[np.int64]  # [r + 1]
    sequence_length: int
    dropped_tokens: int
    truncated_documents: int  # documents with tokens in a row, but not all of them in the same row

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.row_boundaries) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """Return the ``[k, 2]`` segments of one row, in order."""
        return self.segments[self.row_boundaries[index] : self.row_boundaries[index + 1]]

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows, without padding."""
        return int((self.segments[:, 1] - self.segments[:, 0]).sum())

    @property
    def padded_tokens(self) -> int:
        """Number of padding tokens in all rows."""
        return len(self) * self.sequence_length - self.tokens

    def __str__(self) -> str:
        places = len(self) * self.sequence_length
        stream = self.tokens + self.dropped_tokens
        return (
            f"{len(self):,} sequences of {self.sequence_length:,} tokens; documents cut: {self.truncated_documents:,},"
            f" tokens dropped: {self.dropped_tokens:,} ({self.dropped_tokens / max(stream, 1):.2%}),"
            f" padding: {self.padded_tokens:,} ({self.padded_tokens / max(places, 1):.2%})"
        )


def pack_documents(
    document_boundaries: NDArray[np.int64], sequence_length: int, packing: Packing = "concat"
) -> PackedRows:
    """Pack documents into rows. Rows, and the segments within each row, are in the order of their first tokens.

    ``document_boundaries`` are ``[n + 1]`` ascending token indices ``[0, end of document 1, end of document 2, ..]``.
    Empty documents are allowed and are left out.
    """
    rows = {"chunk": chunk, "concat": concat, "best_fit": best_fit}[packing](document_boundaries, sequence_length)
    if len(rows) == 0:
        longest = int(np.diff(document_boundaries).max(initial=0))
        if packing == "chunk" and longest:
            raise ValueError(
                f"No document has `sequence_length` = {sequence_length:,} tokens: the longest has {longest:,}. Lower"
                " `sequence_length`, or set `packing: best_fit`, which puts several documents into a sequence."
            )
        raise ValueError(
            f"{document_boundaries[-1]:,} tokens do not fill one sequence of `sequence_length` = {sequence_length:,}."
            " Add text or lower `sequence_length`."
        )
    return rows


@dataclass(frozen=True)
class LongDocuments:
    """Oversampling of long documents.

    After Xiong et al. (2023), https://arxiv.org/abs/2309.16039, whose ablation (Section 4.2) limits the expected
    benefit: "the quality of the data plays a more critical role than the length of texts".

    Args:
        longer_than: Documents with more tokens than this are long.
        weight: How often each long document occurs, from 1 to 1000; with 1.5, every other one occurs twice.
    """

    longer_than: PositiveInt
    weight: LongDocumentWeight

    def order(self, document_boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of documents in packing order: all documents, then the long ones again, and so on.

        A repeated document is never next to its original, where a model with contexts across documents would copy it.

        Example:
            >>> LongDocuments(longer_than=2, weight=2.5).order(np.array([0, 3, 5, 9])).tolist()
            [0, 1, 2, 0, 2, 2]
        """
        lengths = np.diff(document_boundaries)
        long = np.flatnonzero(lengths > self.longer_than)
        whole = int(self.weight)
        turns = np.floor(np.arange(len(long) + 1) * (self.weight - whole))
        order = np.concatenate([np.arange(len(lengths)), np.tile(long, whole - 1), long[np.diff(turns) > 0]])
        tokens = int(lengths[long].sum())
        total = int(lengths.sum())
        repeated = int(lengths[order].sum())
        rank_zero_only(_log.info)(
            f"{len(long)} of {len(lengths)} documents are longer than {self.longer_than} tokens. They have"
            f" {tokens / max(total, 1):.1%} of the tokens, and"
            f" {(tokens + repeated - total) / max(repeated, 1):.1%} with repetitions."
        )
        return order


def pack_in_order(
    document_boundaries: NDArray[np.int64], order: NDArray[np.int64], sequence_length: int, packing: Packing = "concat"
) -> PackedRows:
    """Pack documents in a given order; a document may occur more than once.

    Example:
        >>> rows = pack_in_order(np.array([0, 3, 5]), order=np.array([1, 0, 0]), sequence_length=4)
        >>> [rows.row(index).tolist() for index in range(len(rows))]
        [[[3, 5], [0, 2]], [[2, 3], [0, 3]]]
    """
    # 1. Pack a virtual stream that has the documents in this order.
    lengths = np.diff(document_boundaries)[order]
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    rows = pack_documents(boundaries, sequence_length, packing)
    # 2. Shift each segment from its document's place in the virtual stream to the place in the actual one.
    place = document_of(rows.segments[:, 0], boundaries)
    shift = document_boundaries[order[place]] - boundaries[place]
    return replace(rows, segments=rows.segments + shift[:, None])


def chunk(document_boundaries: NDArray[np.int64], sequence_length: int) -> PackedRows:
    """Fill each row from one document: its first tokens, its next tokens, and so on.

    No row mixes documents or is padded. The remaining tokens of a document that do not fill a row are dropped, and so
    is every shorter document. The authors of LongCE do this with long documents, but pad short ones and train on the
    padding.

    Example:
        >>> rows = chunk(np.array([0, 3, 12]), sequence_length=4)
        >>> [rows.row(index).tolist() for index in range(len(rows))], rows.dropped_tokens
        ([[[3, 7]], [[7, 11]]], 4)
    """
    starts = _find_whole_rows(document_boundaries, sequence_length)
    segments = np.stack([starts, starts + sequence_length], axis=1)
    return _make_rows(document_boundaries, sequence_length, segments, np.arange(len(starts) + 1, dtype=np.int64))


def concat(document_boundaries: NDArray[np.int64], sequence_length: int) -> PackedRows:
    """Concatenate the documents and cut every ``sequence_length`` tokens.

    Nothing is padded, and only the incomplete last row is dropped. A document that is cut continues in the next row as
    a separate segment, without the preceding context.

    Example:
        >>> rows = concat(np.array([0, 3, 9]), sequence_length=4)
        >>> [rows.row(index).tolist() for index in range(len(rows))], rows.dropped_tokens
        ([[[0, 3], [3, 4]], [[4, 8]]], 1)
    """
    # 1. Rows start at every multiple of the sequence length; the last multiple is the end of the last row.
    cuts = np.arange(int(document_boundaries[-1]) // sequence_length + 1, dtype=np.int64) * sequence_length
    # 2. Segments start at every row and at every document. Both arrays ascend, and a stable sort merges two ascending
    #    runs many times faster than `np.union1d`.
    edges = np.sort(np.concatenate([document_boundaries[document_boundaries < cuts[-1]], cuts]), kind="stable")
    edges = edges[np.diff(edges, prepend=-1) > 0]  # drop duplicates, which are documents at a row's start or empty
    segments = np.stack([edges[:-1], edges[1:]], axis=1)
    # 3. A row begins with the segment that starts at its cut.
    return _make_rows(document_boundaries, sequence_length, segments, np.searchsorted(edges, cuts))


def best_fit(document_boundaries: NDArray[np.int64], sequence_length: int) -> PackedRows:
    """Put whole documents into rows by best-fit-decreasing, so that as few documents as possible are cut.

    The algorithm of Ding et al. (2024), "Fewer Truncations Improve Language Modeling",
    https://arxiv.org/abs/2404.10830. A document longer than a row fills whole rows from its front. Its remaining
    tokens, and every shorter document, are placed uncut, longest first, into the fullest row that has room for them.
    Free space in a row is padded.

    Example:
        >>> rows = best_fit(np.array([0, 3, 8, 9]), sequence_length=4)
        >>> [rows.row(index).tolist() for index in range(len(rows))]
        [[[0, 3], [7, 8]], [[3, 7]], [[8, 9]]]
        >>> rows.padded_tokens, rows.truncated_documents
        (3, 1)
    """
    # 1. Long documents fill whole rows from their front.
    starts = _find_whole_rows(document_boundaries, sequence_length)
    # 2. The remaining tokens of each document, or all of a short one, are an item to be placed uncut.
    rests = np.diff(document_boundaries) % sequence_length
    ends = document_boundaries[1:][rests > 0]
    rests = rests[rests > 0]
    # 3. Number the rows: first the whole ones, then the bins of the items.
    row = np.concatenate([np.arange(len(starts)), len(starts) + best_fit_decreasing(rests, sequence_length)])
    segments = np.concatenate(
        [np.stack([starts, starts + sequence_length], axis=1), np.stack([ends - rests, ends], axis=1)]
    )
    # 4. Order rows by their first token, and segments within a row by position.
    first = np.full(int(row.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, row, segments[:, 0])
    row = first[row]
    order = np.lexsort((segments[:, 0], row))
    boundaries = np.append(np.flatnonzero(np.diff(row[order], prepend=-1)), len(order))
    return _make_rows(document_boundaries, sequence_length, segments, boundaries, order)


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Assign ``[n]`` items to bins numbered from 0: longest first, each to the fullest bin that has room for it.

    A million items take less than a second.

    Example:
        >>> best_fit_decreasing(np.array([3, 5, 2, 4]), capacity=7).tolist()
        [1, 0, 0, 1]
    """
    order = np.argsort(-lengths, kind="stable")
    bins: defaultdict[int, deque[int]] = defaultdict(deque)  # bins that are not full, by their free space
    spaces: list[int] = []  # the ascending free spaces of these bins
    opened = 0
    placed = []
    for size in lengths[order].tolist():
        # 1. Take a bin with the least free space that is enough, or open one.
        index = bisect_left(spaces, size)
        if index < len(spaces):
            free = spaces[index]
            number = bins[free].popleft()
            if not bins[free]:
                del spaces[index]
        else:
            free = capacity
            number = opened
            opened += 1
        placed.append(number)
        # 2. Return it by its new free space, unless it is full.
        rest = free - size
        if rest:
            if not bins[rest]:
                insort(spaces, rest)
            bins[rest].append(number)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    bin_of[order] = placed
    return bin_of


def _find_whole_rows(document_boundaries: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
    """Return the start of each row that one document fills, when every document is cut from its front."""
    whole = np.diff(document_boundaries) // sequence_length
    before = np.cumsum(whole) - whole
    number_in_document = np.arange(int(whole.sum()), dtype=np.int64) - np.repeat(before, whole)
    return np.repeat(document_boundaries[:-1], whole) + number_in_document * sequence_length


def _make_rows(
    document_boundaries: NDArray[np.int64],
    sequence_length: int,
    segments: NDArray[np.int64],
    row_boundaries: NDArray[np.int64],
    order: NDArray[np.int64] | slice = slice(None),
) -> PackedRows:
    """Make rows of segments in the given order, and count dropped tokens and truncated documents."""
    document = document_of(segments[:, 0], document_boundaries)
    begun = document_boundaries[document] == segments[:, 0]
    ended = document_boundaries[document + 1] == segments[:, 1]
    truncated = np.zeros(len(document_boundaries), dtype=bool)
    truncated[document[~(begun & ended)]] = True
    return PackedRows(
        segments=segments[order],
        row_boundaries=row_boundaries,
        sequence_length=int(sequence_length),
        dropped_tokens=int(document_boundaries[-1]) - int((segments[:, 1] - segments[:, 0]).sum()),
        truncated_documents=int(truncated.sum()),
    )


def document_of(tokens: NDArray[np.int64], document_boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the document of each token of the stream."""
    # An empty document shares its boundary with the next one, which the tokens belong to.
    return np.searchsorted(document_boundaries, tokens, side="right") - 1
