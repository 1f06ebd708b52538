"""States that a model is in for a while, and afterwards no more."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Let go of each weight's half-precision copy after its use; each is used once, and together they are the model."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, and afterwards put each submodule back into the mode it was in."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
