"""The paper's optimizer and learning rate (Appendix A.2 of Fang et al., 2025)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

# Class and arguments, so that they can be written to a saved config.
OPTIMIZER: dict[str, Any] = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.0},
}
LR_SCHEDULER: dict[str, Any] = {
    "class_path": "torch.optim.lr_scheduler.LinearLR",
    "init_args": {"start_factor": 0.05, "total_iters": 19},
}


def default_optimizer(parameters: Iterable[Tensor]) -> Optimizer:
    """Return the paper's AdamW."""
    return torch.optim.AdamW(parameters, **OPTIMIZER["init_args"])


def default_lr_scheduler(optimizer: Optimizer) -> LinearLR:
    """Return the paper's schedule: a warm-up over 20 steps, then a constant learning rate."""
    return LinearLR(optimizer, **LR_SCHEDULER["init_args"])
