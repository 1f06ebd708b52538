"""Lockstep: all ranks that share a model's weights run the same number of forward passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_modules.batch import unscored_token
from lightning_modules.models.optimizations import eval_mode
from lightning_modules.models.scorer import Scorer


@contextmanager
def lockstep(backbone: Scorer) -> Iterator[Callable[..., Any]]:
    """Run the same number of forward passes in all ranks, even if they have different amounts of work.

    A forward pass with sharded weights gathers them from all ranks, so a rank that makes an additional pass would wait
    forever. Each pass in the block is announced to the other ranks; at the end of the block, a rank runs dummy passes
    until all ranks have run out of work. A rank without work must enter the block as well. Blocks can be nested. If the
    weights are not sharded, the block does nothing.

    Yields:
        ``run(function, *args, **kwargs)``, which calls a function that makes one forward pass: the backbone, or its
        method `Backbone.unsharded`.
    """
    if not backbone.is_sharded:
        yield lambda function, *args, **kwargs: function(*args, **kwargs)
        return

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Announces the pass, so that ranks without work make a dummy pass at the same time.
        any_rank(True, backbone.device)
        return function(*args, **kwargs)

    # Inner blocks only announce; the outermost one knows when all work is done.
    is_outermost = not backbone.in_lockstep
    backbone.in_lockstep = True
    try:
        yield run
        if is_outermost:
            with torch.no_grad(), eval_mode(backbone):
                while any_rank(False, backbone.device):
                    # The shortest pass that gathers all weights.
                    backbone(unscored_token(backbone.device))
    finally:
        backbone.in_lockstep = not is_outermost


def any_rank(value: bool, device: torch.device | str) -> bool:
    """Return whether the value is true in any rank; all ranks must call it together."""
    if not dist.is_initialized():
        return value
    flag = torch.tensor(int(value), device=device)
    # An integer, because not all backends reduce booleans.
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
