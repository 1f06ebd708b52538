"""What was measured, as the experiments look it up."""

import math
from dataclasses import dataclass

from benchmarks.reproduction.miniature.measure import Masks, Tokens
from benchmarks.reproduction.miniature.plan import Plan
from benchmarks.reproduction.miniature.settings import Miniature
from benchmarks.reproduction.miniature.training import Laboratory, Measurement, Run
from lightning_modules.functional import key_token_mask, long_perplexity, soft_influence

METRICS = {
    "longppl": "LongPPL",
    "perplexity": "PPL",
    "longppl_soft": "LongPPL, soft influence",
    "longppl_without_lcl": "LongPPL without LCL",
    "longppl_self": "LongPPL, evaluated by itself",
    "perplexity_ngrams": "PPL of recurring N-grams",
    "perplexity_answers": "PPL of far answers",
    "perplexity_others": "PPL of all other tokens",
}
"""Metrics of experiment A and their names in the report."""


@dataclass(frozen=True)
class Results:
    """Everything measured, as the experiments look it up.

    Attributes:
        laboratory: Where the runs are.
        plan: Which there are.
    """

    laboratory: Laboratory
    plan: Plan

    @property
    def settings(self) -> Miniature:
        """The declared experiments."""
        return self.laboratory.settings

    @property
    def masks(self) -> Masks:
        """What each token of the documents is."""
        return self.laboratory.examination.masks

    @property
    def judge(self) -> Tokens:
        """The evaluator's likelihoods."""
        return self.laboratory.tokens(self.plan.evaluator)

    def last(self, run: Run) -> Measurement:
        """What was found of the finished model."""
        return self.laboratory.measurements(run)[-1]

    def metrics(self, run: Run, step: int | None = None) -> dict[str, float]:
        """`token_metrics` of a model."""
        return token_metrics(self.laboratory.tokens(run, step), self.judge, self.masks, self.settings)


def token_metrics(model: Tokens, judge: Tokens, masks: Masks, settings: Miniature) -> dict[str, float]:
    """Every metric of experiment A for one model.

    Args:
        model: Its likelihoods of the documents.
        judge: Those of the evaluator.
        masks: What each token is.
        settings: Thresholds.

    Returns:
        By name; NaN where there is no token to average over.
    """
    thresholds = {"alpha": settings.alpha, "beta": settings.beta}
    influences = {
        "longppl": masks.scored & key_token_mask(judge.long, judge.short, **thresholds),
        "perplexity": masks.scored,
        "longppl_soft": masks.scored * soft_influence(judge.long, judge.short, gamma=settings.gamma),
        "longppl_without_lcl": masks.scored
        & key_token_mask(judge.long, judge.short, alpha=settings.alpha, beta=-math.inf),
        "longppl_self": masks.scored & key_token_mask(model.long, model.short, **thresholds),
        "perplexity_ngrams": masks.recurring,
        "perplexity_answers": masks.far,
        "perplexity_others": masks.scored & ~masks.far,
        "perplexity_local": masks.local,
    }
    return {name: float(long_perplexity(model.long, influence)) for name, influence in influences.items()}
