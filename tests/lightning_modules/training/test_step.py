"""Sums of an optimizer step against plain means over all of its tokens, and which of them an objective has."""

import math

import numpy as np
import pytest
import torch

from lightning_modules.functional import ShortScores
from lightning_modules.objectives import CrossEntropy, LongCE, StoredInfluence
from lightning_modules.training.step import REFERENCE_TOKENS, TrainingStatistics


class TwoProcesses:
    """Another process has the same batches, and sums are over both."""

    def reduce(self, values, reduce_op):
        assert reduce_op == "sum"
        return 2 * values


class OneProcess:
    def reduce(self, values, reduce_op):
        return values


def make_batch(seed, tokens=40):
    generator = torch.Generator().manual_seed(seed)
    scored = torch.rand(2, tokens, generator=generator) > 0.3
    long = -torch.rand(2, tokens, generator=generator) * scored
    weights = 2 * torch.rand(2, tokens, generator=generator) * scored
    return long, weights.clamp(max=1.5), scored


@pytest.mark.core
@pytest.mark.parametrize(("strategy", "copies"), [(OneProcess(), 1), (TwoProcesses(), 1), (TwoProcesses(), 2)])
def test_means_are_those_of_all_tokens_of_the_step(strategy, copies):
    statistics = TrainingStatistics(LongCE(gamma=1.5))
    batches = [make_batch(seed) for seed in (0, 1)]
    for long, weights, scored in batches:
        loss = -(weights * long).sum() / REFERENCE_TOKENS
        statistics.update(loss, long, weights, scored.numpy(), cap=1.5)
    found = statistics.compute(strategy, torch.tensor(3.0), copies=copies)
    long, weights, scored = (torch.cat([batch[part] for batch in batches]).double() for part in range(3))
    processes = (1 if isinstance(strategy, OneProcess) else 2) // copies
    tokens = scored.sum()
    expected = {
        "loss": -(weights * long).sum() / tokens,
        "perplexity": torch.exp(-long.sum() / tokens),
        "gradient_norm": 3.0,
        "step_tokens": processes * scored.numel(),
        "weight_mean": weights.sum() / tokens,
        "weight_above_1": (weights > 1).sum() / tokens,
        "weight_effective_share": weights.sum() ** 2 / (weights.square().sum() * tokens),
        "weight_at_cap": (weights >= 1.5).sum() / tokens,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-6
    )
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert float(statistics.step_divisor) == processes * float(tokens)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (CrossEntropy(), set()),
        (LongCE(), {"weight_mean", "weight_above_1", "weight_effective_share", "weight_at_cap"}),
        (StoredInfluence(), {"weight_mean", "weight_above_1", "weight_effective_share", "weight_at_cap"}),
    ],
)
def test_an_objective_without_weights_has_no_numbers_of_them(objective, names):
    statistics = TrainingStatistics(objective)
    long, weights, scored = make_batch(0)
    statistics.update(long.sum(), long, weights, scored.numpy(), cap=objective.largest_weight)
    found = statistics.compute(OneProcess())
    assert {name for name in found if name.startswith("weight")} == names
    assert math.isnan(found["gradient_norm"])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("cause", ["objective", "long", "short"])
def test_invalid_weights_are_faults_of_the_objective_only_for_finite_log_likelihoods(wrong, cause):
    statistics = TrainingStatistics(LongCE())
    long, weights, scored = make_batch(0)
    short = ShortScores(long.clone(), torch.ones_like(scored))
    weights[1, 3] = wrong
    if cause == "long":
        long[1, 3] = math.nan
    if cause == "short":
        short.log_likelihood[1, 3] = -math.inf
    statistics.update(long.sum(), long, weights, np.asarray(scored), cap=5.0, short=short)
    statistics.compute(OneProcess())
    if cause != "objective":
        statistics.check_weights(7)
        return
    with pytest.raises(FloatingPointError, match=r"LongCE .* at step 7"):
        statistics.check_weights(7)
