"""Positions of training sequences that skip, so that short sequences train the positions of long texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jsonargparse.typing import PositiveInt
from numpy.typing import NDArray

from lightning_modules.functional.checks import check_count


@dataclass(frozen=True)
class PoSE:
    r"""Settings of positional skip-wise training (PoSE).

    Zhu et al. (2024), https://arxiv.org/abs/2309.10400, Section 3.2. Each document of a training sequence is cut into
    chunks, and the positions skip from one chunk to the next, so that a model sees all distances up to the target
    length in short sequences. The tokens are those of the sequence without PoSE: of the paper's choices for the text of
    the chunks (Equation 5), this is :math:`v_i = 0`.

    In a document of n tokens, the cuts are distinct places drawn uniformly, and :math:`u_i` positions are skipped
    before chunk i (Equation 4):

    .. math:: u_0 = 0, \qquad u_i \sim U(\{u_{i-1}, \dots, L_t - n\})

    Args:
        target_length: Number of positions :math:`L_t`, the length that the model's context is extended to.
        chunks: Chunks of each document; a shorter document has one chunk per token.
    """

    target_length: PositiveInt
    chunks: PositiveInt = 2

    def check(self, sequence_length: int) -> None:
        """Raise a ``ValueError`` for settings with which no position would skip."""
        check_count("`pose.chunks`", self.chunks, minimum=2)
        check_count("`pose.target_length`", self.target_length)
        if self.target_length <= sequence_length:
            raise ValueError(
                f"`pose.target_length` = {self.target_length} must be above `sequence_length` = {sequence_length}, or"
                " no position skips: lower `sequence_length`, or remove `pose`."
            )

    def positions(self, document_ends: NDArray[np.int64], seed: Sequence[int]) -> NDArray[np.int64]:
        """Return ``[T]`` positions of a sequence, which depend only on the arguments.

        Args:
            document_ends: Ascending token indices at which the documents end; the last one is T.
            seed: Numbers that no other sequence has.

        Example:
            >>> PoSE(target_length=100).positions(np.array([4, 9]), [0, 2])
            array([ 0,  1,  2, 10,  0,  1, 40, 41, 42])
        """
        generator = np.random.default_rng(seed)
        documents = []
        for length in np.diff(document_ends, prepend=0).tolist():
            # 1. Cut the document.
            count = min(self.chunks, length)
            cuts = generator.choice(max(length - 1, 0), size=max(count - 1, 0), replace=False) + 1
            # 2. Draw how many positions each chunk skips. The last token stays below the target length.
            skipped = np.zeros(length, dtype=np.int64)
            total = 0
            for cut in np.sort(cuts).tolist():
                total = int(generator.integers(total, self.target_length - length, endpoint=True))
                skipped[cut:] = total
            documents.append(np.arange(length) + skipped)
        return np.concatenate(documents)
