"""Documents of any length to rows of one length: pure arithmetic on token indices, no token is touched."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PackedRows:
    """Which stretches of the token stream make up each row; what every packing strategy produces.

    Attributes:
        segments: ``[s, 2]`` int64 start and stop of each segment in the token stream; a segment lies in one document.
        row_borders: ``[r + 1]`` int64; row ``r`` is made of ``segments[row_borders[r] : row_borders[r + 1]]``.
        dropped_tokens: Tokens of the stream that are in no row.
    """

    segments: NDArray[np.int64]
    row_borders: NDArray[np.int64]
    dropped_tokens: int

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.row_borders) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """``[k, 2]`` segments of one row, in order."""
        return self.segments[self.row_borders[index] : self.row_borders[index + 1]]


def pack_documents(document_borders: NDArray[np.int64], sequence_length: int) -> PackedRows:
    """Concatenate the documents and cut every ``sequence_length`` tokens.

    No padding, and at most ``sequence_length - 1`` tokens of the whole corpus are dropped (the incomplete last row).
    The price: a document cut at a row's end goes on in the next row as a segment of its own, without the context that
    stayed behind. For books, mostly longer than a row, any strategy has to cut.

    Args:
        document_borders: ``[n + 1]`` ascending token indices ``[0, end of document 1, end of document 2, ..]``.
        sequence_length: Tokens per row.

    Raises:
        ValueError: If ``sequence_length`` is below 1, or the documents do not fill one row.

    Example:
        >>> rows = pack_documents(np.array([0, 3, 9]), sequence_length=4)
        >>> [rows.row(index).tolist() for index in range(len(rows))]
        [[[0, 3], [3, 4]], [[4, 8]]]
        >>> rows.dropped_tokens
        1
    """
    if sequence_length < 1:
        raise ValueError(f"A row has at least one token: set `sequence_length` to 1 or more, got {sequence_length}.")
    tokens = int(document_borders[-1])
    rows = tokens // sequence_length
    if rows == 0:
        raise ValueError(
            f"{tokens:,} tokens do not fill one row of `sequence_length` = {sequence_length:,}."
            " Give more text or lower `sequence_length`."
        )
    cuts = np.arange(rows + 1, dtype=np.int64) * sequence_length
    edges = np.union1d(document_borders[document_borders < cuts[-1]], cuts)
    return PackedRows(
        segments=np.stack([edges[:-1], edges[1:]], axis=1),
        row_borders=np.searchsorted(edges, cuts),
        dropped_tokens=tokens - int(cuts[-1]),
    )
