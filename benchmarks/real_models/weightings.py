"""Training steps of a model by a weighting of its tokens, without Lightning."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datamodules.packing.sequences import collate_examples
from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import long_cross_entropy
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.objectives import CrossEntropy, Interpolated, LongCE, Objective


@dataclass(frozen=True)
class Method:
    """A weighting: an objective, or weights that an evaluator stored for the tokens, or for others at random."""

    objective: Objective
    stored: bool = False
    shuffled: bool = False


METHODS: dict[str, Method] = {
    "CE": Method(CrossEntropy()),
    "LongCE": Method(LongCE()),
    "LongCE, half CE": Method(Interpolated(LongCE())),
    "stored by the evaluator": Method(LongCE(), stored=True),
    "control: shuffled weights": Method(LongCE(), stored=True, shuffled=True),
}


def batch_of(ids: Tensor) -> PackedBatch:
    """Return ``[B, T]`` token ids as a batch of one document in each sequence."""
    return collate_examples([{"input_ids": row, "position_ids": torch.arange(len(row))} for row in ids])


def shuffle_weights(batch: PackedBatch, stored: Tensor) -> Tensor:
    """Give the ``[B, T]`` stored weights to other scored tokens, at random."""
    scored = batch["labels"].ne(IGNORE_INDEX)
    values = stored[scored]
    generator = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
    return torch.ones_like(stored).masked_scatter(scored, values[torch.randperm(len(values), generator=generator)])


def make_optimizer(model: torch.nn.Module, rate: float, steps: int) -> tuple[Any, Any]:
    """Return AdamW and its schedule, a warm-up of up to 20 steps and a cosine to a tenth of the learning rate."""
    warmup = max(min(20, steps // 4), 1)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(step / max(steps, 1), 1)))

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Run:
    """Training of a model with a weighting and a short context of `window` to twice `window` tokens."""

    def __init__(self, backbone: Backbone, method: Method, *, steps: int, rate: float, window: int) -> None:
        self.backbone = backbone.train()
        self.method = method
        self.window = window
        self.optimizer, self.schedule = make_optimizer(self.backbone, rate, steps)

    def step(self, batch: PackedBatch, stored: Tensor | None = None) -> float:
        """Train on a batch, with its ``[B, T]`` stored weights, and return the CPU seconds."""
        started = time.process_time()
        method = self.method
        short = None
        if method.objective.uses_short_context and not method.stored:
            short = short_log_likelihood(self.backbone, batch, ShortContext(self.window, self.window))
        long = self.backbone(batch)
        if stored is None:
            weights = method.objective(long.detach(), short, batch)
        else:
            weights = shuffle_weights(batch, stored) if method.shuffled else stored
            weights = weights.masked_fill(batch["labels"].eq(IGNORE_INDEX), 0.0)
        loss = long_cross_entropy(long, weights, batch["labels"])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.backbone.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return time.process_time() - started
