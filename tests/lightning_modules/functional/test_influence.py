import math

import pytest
import torch

from lightning_modules.functional import key_token_mask, long_short_difference, soft_influence


def test_thresholds_are_strict():
    long = torch.tensor([-1.0, -1.0, -2.0, -1.9, -0.5])
    short = torch.tensor([-3.0, -3.1, -9.0, -9.0, -0.1])
    assert key_token_mask(long, short).tolist() == [False, True, False, True, False]
    assert key_token_mask(long, short, alpha=1.0, beta=-math.inf).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("thresholds", "value"), [({"alpha": -1.0}, "-1.0"), ({"beta": 2.0}, "2.0"), ({"alpha": math.nan}, "nan")]
)
def test_thresholds_without_a_meaning_are_refused(thresholds, value):
    with pytest.raises(ValueError, match=value):
        key_token_mask(torch.zeros(1), torch.zeros(1), **thresholds)


def test_soft_influence_is_the_likelihood_ratio_capped():
    torch.manual_seed(0)
    long, short = -5 * torch.rand(3, 50), -5 * torch.rand(3, 50)
    expected = [
        [min(math.exp(a - b), 3.0) for a, b in zip(*rows, strict=True)]
        for rows in zip(long.double(), short.double(), strict=True)
    ]
    torch.testing.assert_close(soft_influence(long, short, gamma=3.0), torch.tensor(expected))


def test_soft_influence_survives_what_overflows_and_carries_no_gradient():
    long = torch.tensor([-0.1, -200.0, -1.0], requires_grad=True)
    weights = soft_influence(long, torch.tensor([-300.0, -0.1, -1.0]))
    assert weights.tolist() == [5.0, 0.0, 1.0]
    assert not weights.requires_grad


@pytest.mark.parametrize("gamma", [0.0, 0.99, -5.0, math.nan, math.inf])
def test_gamma_is_checked(gamma):
    with pytest.raises(ValueError, match="gamma"):
        soft_influence(torch.zeros(1), torch.zeros(1), gamma=gamma)


def test_long_short_difference_is_differentiable():
    long = torch.tensor([-1.0], requires_grad=True)
    long_short_difference(long, torch.tensor([-2.0])).backward()
    assert long.grad.tolist() == [1.0]


@pytest.mark.parametrize("gamma", [1.0, 1.3, 2.1, 5.0, 9.7])
def test_weights_at_the_cap_are_the_cap(gamma):
    weights = soft_influence(torch.tensor([-0.1]), torch.tensor([-100.0]), gamma=gamma)
    assert weights.item() == torch.tensor(gamma).item()
