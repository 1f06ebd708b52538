"""Samplers that choose the sequences of each process and their order."""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from typing_extensions import override


class RowSampler(Sampler[int]):
    """Sampler of the sequences of one process, in an order that depends only on ``seed`` and the epoch.

    All processes get the same number of sequences, and each sequence occurs at most once. Each epoch omits up to
    ``world_size - 1`` sequences, different ones each time.
    """

    def __init__(self, rows: int, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        if rows < world_size:
            raise ValueError(
                f"{rows} sequence(s) are not enough for {world_size} processes. Add text, or lower `sequence_length` or"
                " the number of devices."
            )
        self.rows = rows
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.skip = 0  # sequences of this process that an interrupted epoch has already used

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order; Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def order(self) -> dict[str, Any]:
        """Return the settings that decide the order in addition to the epoch, as numbers for a checkpoint."""
        # Numbers from the command line have classes of jsonargparse, which loading with `weights_only` refuses.
        return {"rows": int(self.rows), "seed": int(self.seed), "world_size": int(self.world_size)}

    def __len__(self) -> int:
        return self.rows // self.world_size

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.rows)
        return iter(order[self.rank :: self.world_size][self.skip : len(self)].tolist())


class MixtureSampler(RowSampler):
    """Sampler of several weighted sources; the order depends on seed, epoch, weights and number of processes.

    An epoch ends before any source would repeat. Each source's number of sequences is exact to less than one, and
    sources are evenly spread: among the first ``n`` sequences of an epoch over all processes, source ``i`` of ``m``
    with fraction ``s`` has ``n * s`` to within ``1.5 + s * m / 2``. Across epochs, a source goes through all of its
    sequences in random order before it repeats any. Indices of the second source follow those of the first.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(sum(rows.values()), seed=seed, rank=rank, world_size=world_size)
        self.rows_of = dict(rows)
        self.counts = epoch_counts(rows, weights, world_size)

    @override
    def __len__(self) -> int:
        return sum(self.counts.values()) // self.world_size

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.epoch_order(self.epoch)[self.rank :: self.world_size][self.skip :].tolist())

    @override
    def order(self) -> dict[str, Any]:
        return {**super().order(), "rows": list(self.rows_of.values()), "counts": list(self.counts.values())}

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return ``[sum of counts]`` indices of an epoch; process ``r`` takes every ``world_size``-th from ``r``."""
        # Sequence k of the n of a source is due at (k + 0.5) / n of the epoch: sorting spreads all sources evenly.
        due = []
        rows = []
        for index, count in enumerate(self.counts.values()):
            due.append((np.arange(count) + 0.5) / count)
            rows.append(self._draw_rows(index, epoch))
        return np.concatenate(rows)[np.argsort(np.concatenate(due), kind="stable")]

    def _draw_rows(self, source: int, epoch: int) -> NDArray[np.int64]:
        """Return a source's indices in an epoch: the next ones of its passes, which continue across epochs."""
        sizes = list(self.rows_of.values())
        counts = list(self.counts.values())
        rows = sizes[source]
        first = epoch * counts[source]
        last = (epoch + 1) * counts[source]
        passes = range(first // rows, (last - 1) // rows + 1)
        order = np.concatenate([np.random.default_rng([self.seed, source, each]).permutation(rows) for each in passes])
        return order[first - passes[0] * rows : last - passes[0] * rows] + sum(sizes[:source])


def epoch_counts(rows: Mapping[str, int], weights: Mapping[str, float], world_size: int) -> dict[str, int]:
    """Compute each source's number of sequences in an epoch: no more than it has, exact to less than one sequence.

    Example:
        >>> epoch_counts({"books": 100, "code": 90}, {"books": 2, "code": 1}, world_size=4)
        {'books': 99, 'code': 49}
    """
    exact = {name: Fraction(str(float(weights[name]))) for name in rows}  # 0.1 is a tenth, not the nearest float
    total = sum(exact.values())
    length = int(min(rows[name] * total / exact[name] for name in rows)) // world_size * world_size
    due = {}
    counts = {}
    for name, weight in exact.items():
        due[name] = length * weight / total
        counts[name] = int(due[name])
    left = length - sum(counts.values())
    for name in sorted(rows, key=lambda name: counts[name] - due[name])[:left]:
        counts[name] += 1
    for name, count in counts.items():
        if count == 0:
            available = ", ".join(f"{source}: {number}" for source, number in rows.items())
            raise ValueError(
                f"Source {name!r} has no sequence in an epoch of {length} (available: {available}). Raise its weight,"
                " add text to all sources, or use fewer processes."
            )
    return counts
