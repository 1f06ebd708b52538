"""Choose which rows each process sees, and in which order."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class RowSampler(Sampler[int]):
    """Training rows of one process, in an order that depends on ``seed`` and the epoch only.

    All processes see the same number of rows and no row twice; up to ``world_size - 1`` rows are left out, not the same
    ones in each epoch.

    Attributes:
        skip: Rows of this process to skip at the start, because an interrupted epoch had them already.

    Raises:
        ValueError: If there is not a row for each process.
    """

    def __init__(self, rows: int, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        if rows < world_size:
            raise ValueError(
                f"{rows} row(s) are not enough for {world_size} processes. Give more text, or lower `sequence_length`"
                " or the number of devices."
            )
        self.rows = rows
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.skip = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def order(self) -> dict[str, Any]:
        """Return what the order depends on in addition to the epoch, as plain numbers that a checkpoint may hold."""
        # The command line's numbers have their own classes, which a checkpoint loaded without pickle refuses.
        return {"rows": int(self.rows), "seed": int(self.seed), "world_size": int(self.world_size)}

    def __len__(self) -> int:
        return self.rows // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.rows)
        return iter(order[self.rank :: self.world_size][self.skip : len(self)].tolist())
