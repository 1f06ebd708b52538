"""Parts of a training step: its short pass, and sums over its tokens for the logged means."""

import math
import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_modules.batch import IGNORE_INDEX, PackedBatch
from lightning_modules.functional import ShortContext
from lightning_modules.models.optimizations import short_precision
from lightning_modules.models.short_context import short_log_likelihood, sliding_window_log_likelihood
from lightning_modules.objectives import Objective
from lightning_modules.training.sequence_parallel import SequenceGroup, sequence_group


def score_short_context(module: Any, batch: PackedBatch, batch_idx: int, group: SequenceGroup | None) -> ShortContext:
    """Score a training batch in short contexts as a `LongContextLM` is configured, without gradient."""
    backbone = module.backbone
    float8 = module.float8_layers.replace(backbone.decoder, module.global_step)
    with (
        short_precision(module.device, module.short_dtype),
        float8 if module.short_dtype == "float8" else nullcontext(),
    ):
        if module.short_context_method == "sliding_window":
            score = None if group is None else partial(group.sharded_log_likelihood, backbone)
            sizes = {"context_length": module.context_length, "sinks": module.sink_tokens}
            return sliding_window_log_likelihood(backbone, batch, **sizes, score=score)
        # The windows drawn depend on the batch's number over all epochs, so that a resumed run draws the same ones.
        batches = module.trainer.fit_loop.epoch_loop.total_batch_idx if module._trainer else batch_idx
        seed = zlib.crc32(f"{torch.initial_seed()} {batches} {module.global_rank}".encode())
        return short_log_likelihood(
            backbone,
            batch,
            context_length=module.context_length,
            stride=module.stride,
            window_fraction=module.short_window_share,
            seed=seed if group is None else group.broadcast(seed),
            shared_by=None if group is None else group.processes,
        )


class TrainingStatistics:
    """Means over all tokens of one optimizer step: of all its micro-batches and all processes.

    If windows are ``drawn`` at random, single weights are meaningless, but their mean is not. `compute` sets
    ``step_divisor``, the divisor of the step's loss: its number of scored tokens, or the sum of their weights for a
    normalized objective.
    """

    step_divisor: Tensor

    def __init__(self, objective: Objective, *, drawn: bool = False) -> None:
        self.objective = objective
        self.drawn = drawn
        self._sums: Tensor | None = None

    def update(self, loss: Tensor, long: Tensor, token_weights: Tensor, labels: Tensor, *, cap: float | None) -> None:
        """Add a batch, without waiting for the accelerator.

        ``loss`` is a sum over tokens in nats, and ``cap`` the largest weight in this step. The others are ``[B, T]``.
        """
        scored = labels.ne(IGNORE_INDEX)
        weight = token_weights.double() * scored
        # Compare in the weights' dtype: 1.3 in float32 is a little below 1.3 in float64.
        at_cap = token_weights >= torch.tensor(math.inf if cap is None else cap, dtype=token_weights.dtype)
        sums = [
            loss,
            -long.double().sum(),
            scored.sum(),
            weight.sum(),
            (weight > 1).sum(),
            (at_cap & scored).sum(),
            weight.square().sum(),
            loss.new_full((), labels.numel(), dtype=torch.float64),
        ]
        batch = torch.stack([value.double() for value in sums])
        self._sums = batch if self._sums is None else self._sums + batch

    def compute(self, strategy: Strategy, norm: Tensor | None = None) -> dict[str, Tensor]:
        """Return the means as float32 scalars on CPU by name; every process must call it.

        ``step_tokens`` are the input tokens, and ``gradient_norm`` is the given ``norm`` of the gradients, copied to
        the CPU together with the sums.
        """
        assert self._sums is not None, "there is a batch before each optimizer step"
        group = sequence_group(strategy)
        # The progress bar and loggers read the means, and would wait for an accelerator each time.
        sums = strategy.reduce(self._sums, reduce_op="sum")
        norm = sums.new_tensor(math.nan) if norm is None else norm.to(sums, non_blocking=True)
        *values, norm = torch.cat([sums, norm[None]]).cpu().unbind()
        # Each process of a sequence group counts whole sequences, so every token is counted `size` times.
        loss, nll, tokens, weights, above, capped, squares, step_tokens = (
            value / (1 if group is None else group.size) for value in values
        )
        # If all weights are 0, the gradient is 0 and any divisor will do.
        self.step_divisor = weights.where(weights > 0, 1.0) if self.objective.normalized else tokens.clamp(min=1)
        means = {
            "loss": loss / self.step_divisor,
            "perplexity": torch.exp(nll / tokens),
            "gradient_norm": norm,
            "step_tokens": step_tokens,
        }
        has_weights = self.objective.uses_short_context or self.objective.uses_stored_influence
        if has_weights:
            means["weight_mean"] = weights / tokens
        if has_weights and not self.drawn:
            means["weight_above_1"] = above / tokens
            # Kish's effective sample size as a fraction: a mean over this many equal weights would be as noisy.
            means["weight_effective_share"] = weights.square() / (squares * tokens).clamp(min=1e-300)
        if self.objective.largest_weight is not None and not self.drawn:
            means["weight_at_cap"] = capped / tokens
        return {name: value.float() for name, value in means.items()}

    def reset(self) -> None:
        """Start the next optimizer step."""
        self._sums = None


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, also of gradients that are sharded across processes."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
