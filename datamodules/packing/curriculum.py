"""Train on short rows first and long rows later: the same rows in the same order, cut until the switch."""

from dataclasses import dataclass

import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt

from datamodules.packing.sequences import collate_rows, make_row, padded_row
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.checks import check_count


@dataclass(frozen=True)
class LengthCurriculum:
    """Rows that are cut into shorter ones in the first part of training.

    After Xiong et al. (2023), https://arxiv.org/abs/2309.16039, Section 4.4: rows of 4k for 80 % of the steps and of
    32k for the rest reached the perplexity of 32k from the start with 40 % fewer operations; Qasper lost (Table 10).

    Before the switch each row of a batch is cut into ``data.sequence_length / sequence_length`` rows. So batches have
    the same tokens in the same order as without a curriculum, and no token is lost or seen twice; the pieces of a row,
    which are often of one document, are in one batch.

    Args:
        sequence_length: Tokens per row before the switch; it divides ``data.sequence_length``.
        share: Share of the optimizer steps before the switch, between 0 and 1.
    """

    sequence_length: PositiveInt
    share: PositiveFloat

    def __post_init__(self) -> None:
        check_count("`curriculum.sequence_length`", self.sequence_length)
        if not 0 < self.share < 1:
            raise ValueError(
                f"`curriculum.share` is the share of steps with short rows, between 0 and 1, got {self.share}."
                " Without short rows leave `curriculum` out; without long ones lower `sequence_length`."
            )

    def check(self, sequence_length: int) -> None:
        """Raise a ``ValueError`` if rows of ``sequence_length`` cannot be cut into equal, shorter ones."""
        if not 0 < self.sequence_length < sequence_length or sequence_length % self.sequence_length:
            raise ValueError(
                f"`curriculum.sequence_length` = {self.sequence_length} must divide `sequence_length` ="
                f" {sequence_length} and be smaller: rows are cut into equal pieces before the switch."
            )


def cut_rows(batch: PackedBatch, length: int) -> PackedBatch:
    """Cut ``[B, T]`` rows into up to ``[B * ceil(T / length), length]``, in the order of the text.

    Contexts do not reach back into the preceding piece, so the first token of each is not scored. The last piece of a
    row is padded if needed, and padding alone is left out.
    """
    pieces = []
    for index, boundaries in enumerate(batch["document_boundaries"]):
        for start in range(0, boundaries[-1], length):
            stop = min(start + length, boundaries[-1])
            ends = [boundary - start for boundary in boundaries if start < boundary < stop] + [stop - start]
            piece = make_row(batch["input_ids"][index, start:stop].numpy(), np.array(ends))
            piece["labels"] = batch["labels"][index, start:stop].clone()  # prompts may be ignored
            piece["labels"][0] = IGNORE_INDEX
            pieces.append(padded_row(piece, length))
    return collate_rows(pieces)
