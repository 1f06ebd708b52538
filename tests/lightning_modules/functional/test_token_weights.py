import math
from functools import partial

import pytest
import torch

from lightning_modules.functional import (
    excess_loss_weights,
    mutual_information,
    scale_to_mean_one,
    soft_influence,
    threshold_weights,
    top_fraction_weights,
)

pytestmark = pytest.mark.core


def reference_information(long, short, part, shift):
    difference = math.log(math.exp(long) / math.exp(short))
    if part == "absolute":
        return abs(difference)
    return max((difference if part == "positive" else -difference) - math.log(shift), 0.0)


@pytest.mark.parametrize(
    ("part", "shift"), [("positive", 1.0), ("positive", 3.0), ("negative", 1.0), ("negative", 0.5), ("absolute", 1.0)]
)
def test_mutual_information_matches_one_token_at_a_time_in_float64(part, shift):
    torch.manual_seed(0)
    long, short = -5 * torch.rand(3, 50, dtype=torch.float64), -5 * torch.rand(3, 50, dtype=torch.float64)
    expected = [
        [reference_information(a, b, part, shift) for a, b in zip(*rows, strict=True)]
        for rows in zip(long.tolist(), short.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(mutual_information(long, short, part=part, shift=shift), expected)
    assert (expected == 0).any() or part == "absolute"
    single = mutual_information(long.float(), short.float(), part=part, shift=shift)
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)


def test_threshold_is_strict_and_looks_at_both_signs():
    long, short = torch.tensor([-1.0, -1.0, -1.0, -3.0]), torch.tensor([-1.0, -3.0, -3.5, -0.5])
    assert threshold_weights(long, short, threshold=2.0).tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.99, 1.0])
def test_the_fraction_of_each_sequence_that_changes_most_has_weight_1(fraction):
    generator = torch.Generator().manual_seed(3)
    long, short = (-3 * torch.rand(3, 17, generator=generator) for _ in range(2))
    scored = torch.rand(3, 17, generator=generator) < 0.7
    long[2], short[1, 4] = short[2], long[1, 4]  # a sequence without any change, and a token without one
    weights = top_fraction_weights(long.clone().requires_grad_(), short, scored, fraction=fraction)
    for row in range(3):
        difference = (long[row] - short[row]).abs().tolist()
        change = [difference[t] for t in range(17) if scored[row, t]]
        kept = sorted(change, reverse=True)[: max(1, round(fraction * len(change)))]
        expected = [bool(scored[row, t]) and difference[t] >= max(kept[-1], 1e-12) for t in range(17)]
        assert weights[row].bool().tolist() == expected
    assert not weights.requires_grad


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.6, 1.0])
def test_the_excess_loss_of_the_top_fraction_of_each_sequence(fraction):
    draw = torch.Generator().manual_seed(1)
    # Few values, so that some tokens have equal excess; a token that is not scored would be first.
    long = -torch.randint(8, (4, 17), generator=draw).double()
    reference = torch.randint(8, (4, 17), generator=draw).double()
    scored = torch.rand(4, 17, generator=draw) < 0.7
    scored[3] = False
    weights = excess_loss_weights(long.clone().requires_grad_(), reference, scored, fraction=fraction)
    for row in range(4):
        excess = [-float(long[row, t]) - float(reference[row, t]) for t in range(17)]
        ranked = sorted((excess[t] for t in range(17) if scored[row, t]), reverse=True)
        chosen = ranked[: max(1, round(fraction * len(ranked)))]
        assert weights[row].bool().tolist() == [bool(scored[row, t]) and excess[t] >= chosen[-1] for t in range(17)]
    assert not weights.requires_grad


@pytest.mark.parametrize("weigh", [mutual_information, threshold_weights])
def test_weights_are_0_without_a_short_context(weigh):
    long = torch.tensor([-1.0, -2.0])
    assert weigh(long, long).tolist() == [0.0, 0.0]


def weigh_top(long, short, fraction=0.5):
    return top_fraction_weights(long, short, torch.ones_like(long, dtype=torch.bool), fraction=fraction)


@pytest.mark.parametrize("weigh", [soft_influence, mutual_information, threshold_weights, weigh_top])
def test_weights_carry_no_gradient_of_either_context_and_keep_the_dtype(weigh):
    long, short = (torch.rand(1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = weigh(long, short)
    assert not weights.requires_grad
    assert weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("weigh", "option", "values"),
    [
        (mutual_information, "part", ("npmi",)),
        (mutual_information, "shift", (0.0, math.inf, math.nan)),
        (partial(mutual_information, part="absolute"), "shift", (2.0,)),
        (threshold_weights, "threshold", (-0.5, math.nan, math.inf)),
        (weigh_top, "fraction", (0.0, -0.1, 1.01, math.nan)),
    ],
)
def test_weights_without_a_meaning_are_refused(weigh, option, values):
    for value in values:
        with pytest.raises(ValueError, match=f"`{option}`"):
            weigh(torch.zeros(1, 1), torch.zeros(1, 1), **{option: value})


def test_limits_of_settings_are_allowed():
    long, short = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0])
    assert threshold_weights(long, short, threshold=0.0).tolist() == [0.0, 1.0]
    largest = torch.finfo(torch.float32).max
    assert soft_influence(long, short, gamma=largest).tolist() == pytest.approx([1.0, math.e])


def test_scaled_weights_of_each_sequence_have_a_mean_of_one_over_its_scored_tokens():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 40, generator=generator, dtype=torch.float64)
    scored = torch.rand(3, 40, generator=generator) < 0.7
    weights[2] *= ~scored[2]
    found = scale_to_mean_one(weights, scored)
    for row in range(2):
        own = [float(weight) for weight, counts in zip(weights[row], scored[row], strict=True) if counts]
        expected = [float(weight) * len(own) / sum(own) for weight in weights[row]]
        assert found[row].tolist() == pytest.approx(expected, rel=1e-12)
    assert found[2].tolist() == [1.0] * 40, "its scored tokens all have weight 0"
