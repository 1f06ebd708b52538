"""A training step: the check of its batches, gradients of a mean over all its tokens, and means for the log."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_modules.batch import BoolArray, PackedBatch, with_scored
from lightning_modules.functional import ShortScores
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.scorer import Scorer
from lightning_modules.models.short_context import ShortContextConfig
from lightning_modules.objectives import Objective, unwrap
from lightning_modules.training.preflight import check_influence

REFERENCE_TOKENS = 2**15
"""Constant divisor of a batch's loss, which `normalize_gradients` cancels, so any constant gives the same step.

One near the length of a sequence keeps float16 gradients in range, and a power of 2 adds no rounding.
"""


def admit_batch(batch: PackedBatch, backbone: Scorer) -> None:
    """Check a batch where it enters the model; no later function checks it again.

    One of a user's own loader gets ``scored`` here, which torch's loaders may also have made a tensor.
    """
    if not isinstance(batch.get("scored"), np.ndarray):
        batch["scored"] = with_scored(batch)["scored"]
    backbone.check_batch(batch)


def check_training_batch(
    batch: PackedBatch, backbone: Backbone, objective: Objective, short_context: ShortContextConfig
) -> None:
    """Admit a batch to training, or raise an error if it does not fit the objective or the model is in eval mode."""
    admit_batch(batch, backbone)
    if not backbone.training:
        raise RuntimeError("The model is in eval mode, without dropout and gradient checkpointing: call `train()`.")
    if (objective.uses_stored is not None) != ("influence" in batch):
        check_influence(objective, "that come with the sequences" if "influence" in batch else None)
    length = batch["input_ids"].shape[1]
    if objective.uses_short_context:
        short_context.check_sequence(length)


def normalize_gradients(parameters: Iterable[Tensor], divisor: float, *, batches: int) -> float:
    r"""Turn the gradients of an optimizer step into those of its mean loss, in place.

    A batch's loss is a sum over its tokens divided by R = `REFERENCE_TOKENS`, because the number of tokens of the whole
    step is known only after its last batch. Lightning divides each loss by the number of accumulated batches, and the
    strategy averages the gradients over processes. With ``batches`` B, the product of both,

    .. math:: g = \frac{1}{B} \sum_{b=1}^{B} \nabla \frac{1}{R} \sum_t w_t \, \mathrm{NLL}_t
              \qquad\Rightarrow\qquad g \cdot \frac{R B}{N} = \nabla \frac{1}{N} \sum_t w_t \, \mathrm{NLL}_t

    Args:
        parameters: Parameters with the gradients :math:`g`; those without a gradient are skipped.
        divisor: Divisor N of the step, its number of scored tokens.
        batches: Number B that the gradients were divided by: the nominal number of batches of all processes in a step,
            even if the last step is shorter. In a sequence group, each process has the gradients of its tokens only,
            and N counts every token once.

    Returns:
        The number that the gradients were divided by, N / (R B).
    """
    scale = divisor / (REFERENCE_TOKENS * batches)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(scale)
    return scale


class TrainingStatistics:
    """Means over all tokens of one optimizer step: of all its micro-batches and all processes.

    `compute` sets ``step_divisor``, the number of scored tokens of the step, and ``invalid_weights``, the number of
    weights that are NaN, infinite or negative, by kind.
    """

    step_divisor: Tensor
    invalid_weights: dict[str, int]

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._names: list[str] = []  # of the sums
        self._sums: Tensor | None = None

    def update(
        self,
        loss: Tensor,
        long: Tensor,
        token_weights: Tensor,
        scored: BoolArray,
        *,
        cap: float | None,
        short: ShortScores | None = None,
    ) -> None:
        """Add a batch, without waiting for the accelerator.

        ``loss`` is the batch's sum over tokens in nats, divided by `REFERENCE_TOKENS`, and ``cap`` the largest weight
        in this step. The others are ``[B, T]``; log-likelihood and weight of a token that is not scored are 0.
        """
        weights = token_weights.double()
        # Compare in the weights' dtype: 1.3 in float32 is a little below 1.3 in float64.
        largest = torch.tensor(math.inf if cap is None else cap, dtype=token_weights.dtype)
        sums = {
            "loss": loss,
            "nll": -long.double().sum(),
            "tokens": loss.new_full((), scored.size, dtype=torch.float64),
            "scored": loss.new_full((), int(scored.sum()), dtype=torch.float64),
            "weights": weights.sum(),
            "squares": weights.square().sum(),
            "above_1": (weights > 1).sum(),
            "at_cap": (token_weights >= largest).sum(),
        }
        # Faults of the objective, unless the log-likelihoods that it gets are not finite.
        given = long.isfinite()
        if short is not None:
            given &= short.log_likelihood.isfinite()
        sums["NaN"] = (token_weights.isnan() & given).sum()
        sums["infinite"] = (token_weights.isinf() & given).sum()
        sums["negative"] = (token_weights.isfinite() & (token_weights < 0) & given).sum()
        # One tensor, so that processes exchange and the CPU reads all sums at once.
        batch = torch.stack([value.double() for value in sums.values()])
        self._names = list(sums)
        self._sums = batch if self._sums is None else self._sums + batch

    def compute(self, strategy: Strategy, norm: Tensor | None = None, *, copies: int = 1) -> dict[str, Tensor]:
        """Return the means as float32 scalars on CPU by name, and start over; every process must call it.

        ``step_tokens`` are the input tokens, and ``gradient_norm`` is the given ``norm`` of the gradients, copied to
        the CPU together with the sums. With sequence parallelism, ``copies`` processes hold each sequence.
        """
        assert self._sums is not None, "there is a batch before each optimizer step"
        # 1. Sum over all processes, and read the sums once: loggers would wait for the accelerator each time.
        sums = strategy.reduce(self._sums, reduce_op="sum")
        norm = sums.new_tensor(math.nan) if norm is None else norm.to(sums, non_blocking=True)
        *values, norm = torch.cat([sums, norm[None]]).cpu().unbind()
        self._sums = None
        # 2. Each process of a sequence group counts whole sequences, so every token is counted `copies` times.
        total = {name: value / copies for name, value in zip(self._names, values, strict=True)}
        self.invalid_weights = {kind: int(total[kind]) for kind in ("NaN", "infinite", "negative") if total[kind] > 0}
        # 3. Divide by the scored tokens of the step; without any, the gradient is 0 and any divisor will do.
        tokens = total["scored"]
        weights = total["weights"]
        self.step_divisor = tokens.clamp(min=1)
        means = {
            "loss": total["loss"] * REFERENCE_TOKENS / self.step_divisor,
            "perplexity": torch.exp(total["nll"] / tokens),
            "gradient_norm": norm,
            "step_tokens": total["tokens"],
        }
        has_weights = self.objective.uses_short_context or self.objective.uses_stored is not None
        if has_weights:
            means["weight_mean"] = weights / tokens
            means["weight_above_1"] = total["above_1"] / tokens
            # Kish's effective sample size as a fraction: a mean over this many equal weights would be as noisy.
            means["weight_effective_share"] = weights.square() / (total["squares"] * tokens).clamp(min=1e-300)
        if self.objective.largest_weight is not None:
            means["weight_at_cap"] = total["at_cap"] / tokens
        return {name: value.float() for name, value in means.items()}

    def check_weights(self, global_step: int) -> None:
        """Raise a ``FloatingPointError`` that names the objective if `compute` found invalid weights in any process."""
        if not self.invalid_weights:
            return
        outer = type(self.objective).__name__
        inner = type(unwrap(self.objective)).__name__
        found = " and ".join(f"{count:,} {kind}" for kind, count in self.invalid_weights.items())
        raise FloatingPointError(
            f"The objective {inner if inner == outer else f'{inner} (inside {outer})'} returned {found} token weights"
            f" at step {global_step}, for finite log-likelihoods. Weights must be finite and 0 or more: correct"
            " `token_weights`. No optimizer step was taken."
        )

    def reset(self) -> None:
        """Start the next optimizer step."""
        self._sums = None


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, including gradients that are sharded across processes."""
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
