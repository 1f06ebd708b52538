"""Communication between processes that may wait for each other for hours or days."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_modules.utilities.errors import IncompleteError


def patient_group() -> dist.ProcessGroup | None:
    """Create a group of all processes with a timeout of days; return None for a single process.

    The default timeout is half an hour. All processes must be alive when this is called.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=30))


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all processes of a group; raise a ``RuntimeError`` if one has ended."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def fail_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise an error in all processes if one of them fails or exits in the block, so that none waits for it afterwards.

    The processes must not communicate in the block.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = error
    found = gathered(f"{type(failure).__name__}: {failure}" if isinstance(failure, Exception) else failure, group)
    if isinstance(failure, Exception):
        raise failure
    for rank, other in enumerate(found):
        if isinstance(other, str):
            raise IncompleteError(f"Process {rank} failed: {other}")
    stopped = next((other for other in found if other is not None), None)
    if stopped is not None:
        raise stopped
