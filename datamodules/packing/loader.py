"""Resume training at the batch where an interrupted epoch stopped."""

import logging
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from datamodules.packing.samplers import RowSampler
from datamodules.packing.sequences import Row

FORK_IS_SAFE = (3, 11, 10)
"""First version of Python in which a fork does not hang if a C++ thread, such as one of gloo, enters Python."""

_log = logging.getLogger(__name__)


class ResumableLoader(DataLoader[Row]):
    """Loader of the batches of a :class:`RowSampler`, whose state Lightning saves in every checkpoint.

    A plain loader would start a resumed epoch with batches that were already trained on. The state is the epoch and the
    number of its finished batches, because the order depends only on the seed and the epoch.
    """

    sampler: RowSampler  # or Lightning's own for `overfit_batches`, which repeats the first sequences
    batch_size: int
    content = 0  # checksum of the sequences: another text may have the same number of them
    _batches = 0
    _resume: dict[str, Any] | None = None

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private class
        if not isinstance(self.sampler, RowSampler):
            yield from super().__iter__()
            return
        # This is a generator, so that nothing is read before the first batch is requested: Lightning creates the
        # iterator of a resumed run before it sets the sampler's epoch, and workers would prefetch batches of epoch 0.
        resume = self._resume
        self._resume = None
        self._batches = 0
        if resume and resume["epoch"] == self.sampler.epoch:
            self._batches = resume["batches"]
        self.sampler.skip = self._batches * self.batch_size
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches of this epoch so far, and everything that the order depends on."""
        if not isinstance(self.sampler, RowSampler):
            return {}
        return {"epoch": self.sampler.epoch, "batches": self._batches, **self._order_settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip the finished batches in the next epoch."""
        order = self._order_settings() if isinstance(self.sampler, RowSampler) else {}
        changed = {name: (state.get(name), value) for name, value in order.items() if state.get(name) != value}
        if changed:
            _log.warning("The epoch starts over, because the data has changed (then, now): %s.", changed)
        else:
            self._resume = state

    def _order_settings(self) -> dict[str, Any]:
        return {**self.sampler.order(), "batch_size": int(self.batch_size), "content": self.content}


def worker_options(num_workers: int) -> dict[str, Any]:
    """Return options of a loader whose worker processes may tokenize."""
    if num_workers:  # forked workers cannot use the tokenizer's threads, and would warn about it
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if sys.version_info < FORK_IS_SAFE and torch.distributed.is_initialized():
            rank_zero_warn(
                f"Python {platform.python_version()} sometimes hangs when a training process starts loader workers"
                " (https://github.com/python/cpython/issues/112275): use Python 3.11.10 or later, or `num_workers=0`."
            )
    options = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
    return {**options, "worker_init_fn": _leave_process_group if num_workers else None}


def _leave_process_group(_: int) -> None:
    """Keep a worker from the signals that torchrun sends to a training process with its group: that one still saves."""
    os.setpgid(0, 0)
