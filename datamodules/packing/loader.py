"""A training loader that goes on where an interrupted epoch stopped."""

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packing.curriculum import CurriculumStages
from datamodules.packing.samplers import RowSampler
from datamodules.packing.sequences import Row

_log = logging.getLogger(__name__)


class ResumableLoader(DataLoader[Row]):
    """Batches of a :class:`RowSampler`; Lightning keeps its state in every checkpoint.

    A plain loader would begin a resumed epoch with the batches that were already trained on. The state is only how
    many they were and in which epoch: the order is a function of the seed and the epoch.

    Attributes:
        stages: Cuts the rows of the first batches of a run into shorter ones, if there is a curriculum.
        content: Checksum of the rows: another text may well have as many.
    """

    sampler: RowSampler  # or Lightning's own, for `overfit_batches`: the first rows, again and again
    batch_size: int
    stages: CurriculumStages | None = None
    content = 0
    _batches = 0
    _resume: dict[str, Any] | None = None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        if not isinstance(self.sampler, RowSampler):
            yield from super().__iter__()
            return
        # A generator, so that nothing is read before the first batch is asked for: Lightning makes the iterator of a
        # resumed run before it tells the sampler the epoch, and workers would read ahead in the order of epoch 0.
        resume, self._resume = self._resume, None
        self._batches = resume["batches"] if resume and resume["epoch"] == self.sampler.epoch else 0
        self.sampler.skip = self._batches * self.batch_size
        if self.stages:
            self.stages.compare(resume or {})
        for batch in super().__iter__():
            self._batches += 1
            yield self.stages(batch, self.sampler.epoch, self._batches - 1) if self.stages else batch

    def state_dict(self) -> dict[str, Any]:
        """Batches of this epoch handed out so far, and what rows and order depend on."""
        if not isinstance(self.sampler, RowSampler):
            return {}
        return {"epoch": self.sampler.epoch, "batches": self._batches, **self._switch(), **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch leave out the batches that are already done."""
        order = self._order() if isinstance(self.sampler, RowSampler) else {}
        changed = {name: (state.get(name), value) for name, value in order.items() if state.get(name) != value}
        if changed:
            _log.warning("The epoch starts over: its rows are not those of the checkpoint (then, now): %s.", changed)
        else:
            self._resume = state

    def _switch(self) -> dict[str, int]:
        return self.stages.state() if self.stages else {}

    def _order(self) -> dict[str, Any]:
        return {**self.sampler.order(), "batch_size": int(self.batch_size), "content": self.content}
