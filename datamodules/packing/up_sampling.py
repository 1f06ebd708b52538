"""Train on long documents more often: repeat them in the index of the documents, before they are packed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray

from datamodules.packing.packing import PackedRows
from lightning_modules.functional.checks import check_count


@dataclass(frozen=True)
class LongDocuments:
    """Settings of how often long documents are trained on.

    After Xiong et al. (2023), https://arxiv.org/abs/2309.16039, whose ablation (Section 4.2) tempers it: "the quality
    of the data plays a more critical role than the length of texts".

    Args:
        longer_than: Documents of more tokens than this are long.
        weight: How often each is seen per pass over the short ones. With 1.5, half of the long documents, evenly spread
            over the corpus, are seen twice.
    """

    longer_than: PositiveInt
    weight: PositiveFloat

    def __post_init__(self) -> None:
        check_count("`long_documents.longer_than`", self.longer_than)
        if not 1 <= self.weight <= 1000:
            raise ValueError(f"`long_documents.weight` repeats documents: set it to 1 to 1000, got {self.weight}.")

    def order(self, document_borders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return documents in the order in which they are packed: all of them, then the long ones again, and so on.

        A copy is never next to its original, where a model without isolated documents would copy it.

        Example:
            >>> LongDocuments(longer_than=2, weight=2.5).order(np.array([0, 3, 5, 9])).tolist()
            [0, 1, 2, 0, 2, 2]
        """
        lengths = np.diff(document_borders)
        long = np.flatnonzero(lengths > self.longer_than)
        whole = int(self.weight)
        turns = np.floor(np.arange(len(long) + 1) * (self.weight - whole))
        order = np.concatenate([np.arange(len(lengths)), np.tile(long, whole - 1), long[np.diff(turns) > 0]])
        tokens, total, repeated = (int(lengths[part].sum()) for part in (long, slice(None), order))
        rank_zero_info(
            f"{len(long)} of {len(lengths)} documents are longer than {self.longer_than} tokens:"
            f" {tokens / max(total, 1):.1%} of the tokens, {(tokens + repeated - total) / max(repeated, 1):.1%} with"
            " their repetitions."
        )
        return order


def pack_in_order(
    document_borders: NDArray[np.int64], order: NDArray[np.int64], pack: Callable[[NDArray[np.int64]], PackedRows]
) -> PackedRows:
    """Pack the documents as if the stream had them in another order, some of them more than once.

    The segments of the rows are stretches of the token stream as it is.

    Example:
        >>> from datamodules.packing.packing import pack_documents
        >>> rows = pack_in_order(np.array([0, 3, 5]), np.array([1, 0, 0]), lambda borders: pack_documents(borders, 4))
        >>> [rows.row(index).tolist() for index in range(len(rows))]
        [[[3, 5], [0, 2]], [[2, 3], [0, 3]]]
    """
    lengths = np.diff(document_borders)[order]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    rows = pack(borders)
    # Empty documents share their border with the next one, which the segment's tokens belong to.
    place = np.searchsorted(borders, rows.segments[:, 0], side="right") - 1
    shift = document_borders[order[place]] - borders[place]
    return replace(rows, segments=rows.segments + shift[:, None])
