import math

import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.functional import (
    key_token_mask,
    long_cross_entropy,
    long_perplexity,
    long_short_difference,
    soft_influence,
)

pytestmark = pytest.mark.core


def test_thresholds_are_strict():
    long = torch.tensor([-1.0, -1.0, -2.0, -1.9, -0.5])
    short = torch.tensor([-3.0, -3.1, -9.0, -9.0, -0.1])
    assert key_token_mask(long, short).tolist() == [False, True, False, True, False]
    assert key_token_mask(long, short, alpha=1.0, beta=-math.inf).tolist() == [True, True, True, True, False]
    assert key_token_mask(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.1]), alpha=0).tolist() == [False, True]


def test_long_short_difference_is_differentiable():
    long = torch.tensor([-1.0], requires_grad=True)
    long_short_difference(long, torch.tensor([-2.0])).backward()
    assert long.grad.tolist() == [1.0]


@pytest.mark.parametrize("gamma", [1.0, 1.3, 2.1, 5.0, 9.7])
def test_weights_at_the_cap_are_the_cap(gamma):
    weights = soft_influence(torch.tensor([-0.1]), torch.tensor([-100.0]), gamma=gamma)
    assert weights.item() == torch.tensor(gamma).item()


@pytest.fixture
def scores():
    torch.manual_seed(0)
    log_likelihood = -3 * torch.rand(2, 9)
    labels = torch.randint(50, (2, 9))
    labels[:, 0] = labels[1, 6:] = IGNORE_INDEX
    return log_likelihood.masked_fill(labels.eq(IGNORE_INDEX), 0.0), labels


def test_weights_carry_no_gradient(scores):
    log_likelihood, labels = scores
    log_likelihood.requires_grad_()
    weights = torch.rand_like(log_likelihood, requires_grad=True)
    long_cross_entropy(log_likelihood, weights, labels).backward()
    assert weights.grad is None
    torch.testing.assert_close(log_likelihood.grad, -weights.detach() * labels.ne(IGNORE_INDEX) / 13)


def test_perplexity_carries_no_gradient(scores):
    log_likelihood, influence = scores[0].requires_grad_(), torch.rand(2, 9, requires_grad=True)
    assert not long_perplexity(log_likelihood, influence).requires_grad


def test_shapes_are_checked(scores):
    log_likelihood, labels = scores
    with pytest.raises(ValueError, match=r"\[2, 9\].*\[2, 8\]"):
        long_cross_entropy(log_likelihood, log_likelihood, labels[:, :8])
    with pytest.raises(ValueError, match=r"\[2, 9\] and \[9\]"):
        long_perplexity(log_likelihood, labels[0])


def test_weights_that_cancel_are_nan_whatever_the_sign_of_the_sum():
    for sign in (1, -1):  # the quotient alone would be infinity and 0
        log_likelihood = torch.tensor([-1.0, -1.0 - 0.5 * sign])
        assert math.isnan(long_perplexity(log_likelihood, torch.tensor([1.0, -1.0])))
    assert math.isnan(long_perplexity(torch.tensor([-1.0]), torch.tensor([-1.0])))


def test_losses_are_refused_and_rounding_is_not():
    losses, key = torch.tensor([-1.0, 0.2]), torch.tensor([True, True])
    with pytest.raises(ValueError, match=r"A log-likelihood is 0.2,.*not losses"):
        long_perplexity(losses, key)
    assert float(long_perplexity(losses, torch.tensor([True, False]))) == pytest.approx(math.e)
    logit = torch.tensor(20.06)  # the next numbers in bfloat16 are 20 and 20.125
    rounded = (logit.bfloat16().float() - logit).abs()
    assert rounded > 0.05
    assert float(long_perplexity(rounded, torch.tensor(True))) == pytest.approx(1.0, abs=0.1)
