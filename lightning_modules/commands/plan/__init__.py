"""FLOPs, time, memory and cost of training and scoring, computed from a config without weights."""

from lightning_modules.commands.plan.activations import ActivationBytes, activation_bytes
from lightning_modules.commands.plan.flops import (
    Flops,
    authors_scoring_flops,
    authors_short_pass_flops,
    ce_step_flops,
    forward_flops,
    longce_step_flops,
    scoring_floor_flops,
    scoring_flops,
    short_pass_flops,
)
from lightning_modules.commands.plan.shapes import ModelShape

__all__ = [
    "ActivationBytes",
    "Flops",
    "ModelShape",
    "activation_bytes",
    "authors_scoring_flops",
    "authors_short_pass_flops",
    "ce_step_flops",
    "forward_flops",
    "longce_step_flops",
    "scoring_floor_flops",
    "scoring_flops",
    "short_pass_flops",
]
