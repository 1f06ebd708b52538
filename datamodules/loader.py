"""A training loader that goes on where an interrupted epoch stopped."""

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.rows import Row
from datamodules.samplers import RowSampler

_log = logging.getLogger(__name__)


class ResumableLoader(DataLoader[Row]):
    """Batches of a :class:`RowSampler`; Lightning keeps its state in every checkpoint.

    A plain loader would begin a resumed epoch with the batches that were already trained on. The state is only how
    many they were and in which epoch: the order is a function of the seed and the epoch.
    """

    sampler: RowSampler
    batch_size: int
    _batches = 0
    _resume: dict[str, int] | None = None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        # A generator, so that nothing is read before the first batch is asked for: Lightning makes the iterator of a
        # resumed run before it tells the sampler the epoch, and workers would read ahead in the order of epoch 0.
        resume, self._resume = self._resume, None
        self._batches = resume["batches"] if resume and resume["epoch"] == self.sampler.epoch else 0
        self.sampler.skip = self._batches * self.batch_size
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Batches of this epoch handed out so far, and what the order of the rows depends on."""
        return {"epoch": self.sampler.epoch, "batches": self._batches, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next epoch leave out the batches that are already done."""
        changed = {name: (state[name], value) for name, value in self._order().items() if state[name] != value}
        if changed:
            _log.warning("The epoch starts over: its order is not that of the checkpoint (then, now): %s.", changed)
        else:
            self._resume = state

    def _order(self) -> dict[str, int]:
        sampler = self.sampler
        order = {
            "rows": sampler.rows,
            "seed": sampler.seed,
            "world_size": sampler.world_size,
            "batch_size": self.batch_size,
        }
        # The command line's numbers are of classes of their own, which a checkpoint loaded without pickle refuses.
        return {name: int(value) for name, value in order.items()}
