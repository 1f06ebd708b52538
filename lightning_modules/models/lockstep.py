"""Passes through a model by processes that each have as many as their own work takes."""

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_modules.models.backbone import Backbone

Result = TypeVar("Result")


class Passes:
    """Makes passes through a backbone; where each gathers weights from all processes, all make equally many.

    At each pass the processes tell each other whether anybody still has work. Who has none makes passes through one
    token when the block ends, until nobody has any.

    Args:
        backbone: The model.

    Example:
        >>> with Passes(backbone) as passes:  # doctest: +SKIP
        ...     hidden_states = passes(lambda: backbone.decoder(input_ids=tokens).last_hidden_state)
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __enter__(self) -> "Passes":
        return self

    def __call__(self, function: Callable[[], Result]) -> Result:
        """What a function gives that calls decoder and head, each at most once."""
        self._anybody(True)
        return self.backbone.within(function)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while kind is None and self._anybody(False):
            self.backbone.within(self._idle)

    def _idle(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.backbone.device)
        hidden_states = self.backbone.decoder(input_ids=token, position_ids=token, use_cache=False).last_hidden_state
        self.backbone.logits(hidden_states)

    def _anybody(self, works: bool) -> bool:
        if not self.backbone.in_step:
            return works
        working = torch.tensor(int(works), device=self.backbone.device)
        dist.all_reduce(working, dist.ReduceOp.MAX)
        return bool(working)
