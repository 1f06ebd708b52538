"""Train on short sequences first and long ones later: the same sequences in the same order, cut until the switch."""

from dataclasses import dataclass

import numpy as np
from jsonargparse.typing import OpenUnitInterval, PositiveInt

from datamodules.packing.sequences import collate_rows, make_row, padded_row
from lightning_modules.batch import IGNORE_INDEX, PackedBatch


@dataclass(frozen=True)
class LengthCurriculum:
    """Settings of a length curriculum, which cuts sequences into shorter ones in the first part of training.

    After Xiong et al. (2023), https://arxiv.org/abs/2309.16039, Section 4.4: sequences of 4k for 80 % of the steps and
    of 32k for the rest reached the perplexity of 32k from the start with 40 % fewer FLOPs, but a lower score on Qasper
    (Table 10).

    Before the switch, each sequence of a batch is cut into ``data.sequence_length / sequence_length`` chunks. Batches
    have the same tokens in the same order as without a curriculum, and no token is lost or repeated. The chunks of a
    sequence, often from one document, stay in one batch.

    Args:
        sequence_length: Tokens per sequence before the switch; a divisor of ``data.sequence_length``.
        share: Fraction of the optimizer steps before the switch, between 0 and 1.
    """

    sequence_length: PositiveInt
    share: OpenUnitInterval

    def check(self, sequence_length: int) -> None:
        """Raise a ``ValueError`` unless sequences can be cut into equal, shorter chunks and ``share`` is a fraction."""
        divides = 0 < self.sequence_length < sequence_length and sequence_length % self.sequence_length == 0
        if not divides or not 0 < self.share < 1:
            raise ValueError(
                f"`curriculum.sequence_length` = {self.sequence_length} must divide `sequence_length` ="
                f" {sequence_length} and be smaller, because sequences are cut into equal chunks before the switch, and"
                f" `curriculum.share` = {self.share} must be between 0 and 1."
            )


def cut_rows(batch: PackedBatch, length: int) -> PackedBatch:
    """Cut ``[B, T]`` sequences into at most ``[B * ceil(T / length), length]`` chunks, in the order of the text.

    Contexts do not reach into the preceding chunk, so the first token of each chunk is not scored. The last chunk of a
    sequence is padded if needed; chunks of padding only are left out.
    """
    chunks = []
    for index, boundaries in enumerate(batch["document_boundaries"]):
        for start in range(0, boundaries[-1], length):
            stop = min(start + length, boundaries[-1])
            ends = [boundary - start for boundary in boundaries if start < boundary < stop] + [stop - start]
            chunk = make_row(batch["input_ids"][index, start:stop].numpy(), np.array(ends))
            chunk["labels"] = batch["labels"][index, start:stop].clone()  # prompts may be ignored
            chunk["labels"][0] = IGNORE_INDEX
            chunks.append(padded_row(chunk, length))
    return collate_rows(chunks)
