"""Communication between processes that wait for each other for hours or days."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def patient_group() -> dist.ProcessGroup | None:
    """Connect all processes by a group that waits for days; return None if there is one process.

    Ordinary communication gives up after half an hour, which is less than the work of one process may take. Call this
    while all processes are alive and do the same: if one ends later, the others notice at once, but one that has ended
    before would be waited for.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=30))


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of each process of a `patient_group`; raise a ``RuntimeError`` if another one has ended."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
