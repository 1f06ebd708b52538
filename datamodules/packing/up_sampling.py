"""Train on long documents more often: repeat them in the index of the documents, before they are packed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray

from datamodules.packing.packing import PackedRows
from lightning_modules.functional.checks import check_count

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LongDocuments:
    """Settings of how often long documents are trained on.

    Xiong et al. (2023), https://arxiv.org/abs/2309.16039, up-sample long text. Their ablation (Section 4.2, a 7B model)
    tempers it: "the quality of the data plays a more critical role than the length of texts". On NarrativeQA their new
    data gave 23.70 F1, the old data with long text up-sampled 22.15, and without any long text still 19.48.

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
        _report(lengths, long, order, self.longer_than)
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


@rank_zero_only
def _report(lengths: NDArray[np.int64], long: NDArray[np.int64], order: NDArray[np.int64], longer_than: int) -> None:
    tokens = int(lengths[long].sum())
    more = int(lengths[order].sum() - lengths.sum())
    total = max(int(lengths.sum()), 1)
    _log.info(
        "%d of %d documents are longer than %d tokens: %.1f %% of the tokens, %.1f %% with their repetitions.",
        *(len(long), len(lengths), longer_than, 100 * tokens / total, 100 * (tokens + more) / (total + more)),
    )
