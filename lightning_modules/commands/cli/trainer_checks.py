"""Numbers that Lightning's Trainer lets pass and that crash it later, or train the wrong way."""

import os
from collections.abc import Mapping
from typing import Any

from jsonargparse import Namespace

LEAST = {"accumulate_grad_batches": 1, "val_check_interval": 0, "gradient_clip_val": 0, "limit_train_batches": 0}
"""Smallest values; 0 itself only where it switches something off."""


def check_trainer(options: Mapping[str, Any] | Namespace) -> None:
    """Refuse what a trainer must not be given.

    Args:
        options: Arguments of the trainer.

    Raises:
        ValueError: Naming the option, the value and what is allowed.
    """
    for name, limit in LEAST.items():
        value = options.get(name)
        off = name == "gradient_clip_val"
        if isinstance(value, int | float) and (value < limit or (value == 0 and not off)):
            wanted = "1 or more" if limit else "0 or more" if off else "above 0"
            raise ValueError(f"`trainer.{name}` must be {wanted}, got {value}. Leave it out for Lightning's default.")
    most, devices = max(64, 4 * (os.cpu_count() or 1)), str(options.get("devices"))
    if devices.isdecimal() and int(devices) > most:
        raise ValueError(f"`trainer.devices` = {devices} are more processes than this machine bears: {most} at most.")
