"""Train on short rows first and long rows later: the same rows in the same order, cut until the switch."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning import LightningDataModule
from typing_extensions import override

from datamodules.packing.sequences import collate_rows, make_row, padded_row
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional.checks import check_count

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LengthCurriculum:
    """Rows that are cut into shorter ones in the first part of training.

    Xiong et al. (2023), https://arxiv.org/abs/2309.16039, Section 4.4: rows of 4k for 80 % of the steps and of 32k for
    the rest reach the perplexity of 32k from the start (6.49 and 6.52 on books, Table 11) with 40 % fewer operations;
    of their downstream tasks Qasper lost (25.0 and 28.6, Table 10). They trained one 7B model from scratch.

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
        if sequence_length <= self.sequence_length or sequence_length % self.sequence_length:
            raise ValueError(
                f"`curriculum.sequence_length` = {self.sequence_length} must divide `sequence_length` ="
                f" {sequence_length} and be smaller: rows are cut into equal pieces before the switch."
            )


class CurriculumDataModule(LightningDataModule):
    """Data module whose training batches are cut until the switch; whether one is depends on the step alone.

    Args:
        curriculum: When to cut, and how; null for never.
    """

    def __init__(self, curriculum: LengthCurriculum | None = None) -> None:
        super().__init__()
        self.curriculum = curriculum
        self._switch_before: int | None = None

    def check_trainer(self) -> None:
        """Raise a ``ValueError`` if the curriculum needs the number of steps and the trainer has no last one."""
        if self.curriculum and self.trainer and self.trainer.max_steps < 0 and (self.trainer.max_epochs or -1) < 0:
            raise ValueError("`curriculum.share` is a share of all steps: give `trainer.max_steps` or `max_epochs`.")

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.curriculum and self.trainer and self.trainer.training and self.trainer.global_step < self._switch():
            return cut_rows(batch, self.curriculum.sequence_length)
        return batch

    def _switch(self) -> int:
        """Compute the number of optimizer steps with short rows, which is known from the first batch on."""
        assert self.curriculum is not None
        assert self.trainer is not None
        switch = round(self.curriculum.share * self.trainer.estimated_stepping_batches)
        before, self._switch_before = self._switch_before, None  # compared once
        if before not in (None, switch):
            _log.warning(
                "Rows become long after step %d of the run; for the checkpoint's run it was %d. Other"
                " `trainer.max_steps`, `accumulate_grad_batches` or `curriculum` have moved it.",
                *(switch, before),
            )
        return switch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"switch": self._switch()} if self.curriculum and self.trainer else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._switch_before = state_dict.get("switch")


def cut_rows(batch: PackedBatch, length: int) -> PackedBatch:
    """Cut each row into rows of ``length`` tokens, whose contexts do not reach back into the preceding piece.

    Args:
        batch: ``[B, T]`` training rows.
        length: Tokens per piece; the last piece of a row is padded if it has fewer, and padding alone is left out.

    Returns:
        Up to ``[B * ceil(T / length), length]`` rows in the order of the text. The first token of each is not scored.
    """
    pieces = []
    for index, borders in enumerate(batch["document_borders"]):
        for start in range(0, borders[-1], length):
            stop = min(start + length, borders[-1])
            ends = [border - start for border in borders if start < border < stop] + [stop - start]
            piece = make_row(batch["input_ids"][index, start:stop].numpy(), np.array(ends))
            piece["labels"] = batch["labels"][index, start:stop].clone()  # prompts may be ignored
            piece["labels"][0] = IGNORE_INDEX
            pieces.append(padded_row(piece, length))
    return collate_rows(pieces)
