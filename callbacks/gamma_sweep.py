"""Log the loss and the token weights of LongCE for other caps."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_modules.batch import PackedBatch
from lightning_modules.functional import ShortScores, long_cross_entropy
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.objectives import LongCE
from lightning_modules.training.step import REFERENCE_TOKENS, TrainingStatistics


class GammaSweep(Callback):
    """Logs the loss and the weights that LongCE would have with other values of ``gamma``, at every optimizer step.

    They come from the log-likelihoods of the training step, without another pass, and do not change the training. Steps
    without short contexts, such as those of `Scheduled` with cross entropy, have no such numbers. The names are
    ``gamma/loss/<gamma>``, and so on for ``weight_mean``, ``weight_at_cap`` and ``weight_effective_share``.

    Args:
        gammas: Largest token weights to compare, 1 or more.
    """

    def __init__(self, gammas: Sequence[float] = (2, 5, 10, 20)) -> None:
        self._objectives = [LongCE(gamma) for gamma in gammas]
        self._statistics: list[TrainingStatistics] = []
        self._has_short_context = False  # whether the step in progress scores short contexts

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (isinstance(pl_module, LongContextLM) and pl_module.objective.uses_short_context):
            raise ValueError(
                "`GammaSweep` needs a `LongContextLM` whose objective uses short contexts, such as LongCE."
            )
        self._statistics = [TrainingStatistics(objective) for objective in self._objectives]
        if self._observe not in pl_module.token_observers:
            pl_module.token_observers.append(self._observe)

    def _observe(self, long: Tensor, token_weights: Tensor, short: ShortScores | None, batch: PackedBatch) -> None:
        self._has_short_context = short is not None
        if short is None:  # all weights would be 1
            return
        for objective, statistics in zip(self._objectives, self._statistics, strict=True):
            weights = objective(long, short, batch)
            loss = long_cross_entropy(long, weights, batch["labels"], divisor=REFERENCE_TOKENS)
            statistics.update(loss, long, weights, batch["scored"], cap=objective.gamma)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._has_short_context:
            return
        for objective, statistics in zip(self._objectives, self._statistics, strict=True):
            values = statistics.compute(trainer.strategy)
            for name in ("loss", "weight_mean", "weight_at_cap", "weight_effective_share"):
                if name in values:
                    pl_module.log(f"gamma/{name}/{objective.gamma:g}", values[name], batch_size=1)
