import math

import pytest
import torch

from lightning_modules.functional import fit_power_law

pytestmark = pytest.mark.core

CONTEXT = torch.tensor([16, 32, 64, 128, 256, 448])


@pytest.mark.parametrize(("a", "b", "g"), [(8.0, 0.5, 2.0), (100.0, 1.3, 0.0), (0.01, 0.05, 1.0), (300.0, 4.0, 0.5)])
def test_finds_the_parameters_of_a_power_law(a, b, g):
    fit = fit_power_law(CONTEXT, (a / CONTEXT.double()) ** b + g)
    assert fit[:3] == pytest.approx((a, b, g), rel=2e-3, abs=2e-3)
    assert fit.r_squared == pytest.approx(1.0)
    torch.testing.assert_close(fit(CONTEXT), (a / CONTEXT.double()) ** b + g, rtol=1e-5, atol=1e-6)


def test_no_other_parameters_of_a_fine_grid_are_better():
    loss = torch.tensor([3.1, 2.9, 2.75, 2.74, 2.6, 2.61], dtype=torch.float64)
    fit = fit_power_law(CONTEXT, loss)
    best = ((fit(CONTEXT) - loss) ** 2).sum()
    g, b, factor = torch.meshgrid(
        torch.linspace(0, 2.6, 40), torch.logspace(-2, 0.9, 60), torch.linspace(0, 6, 80), indexing="ij"
    )
    scaled = (CONTEXT / 16.0).reshape(-1, 1, 1, 1) ** -b
    errors = ((factor * scaled + g - loss.reshape(-1, 1, 1, 1)) ** 2).sum(0)
    assert best <= errors.min()
    assert fit.r_squared == pytest.approx(1 - float(best / ((loss - loss.mean()) ** 2).sum()))


def test_loss_that_context_does_not_lower():
    rising = fit_power_law(CONTEXT, torch.tensor([2.0, 2.1, 2.2, 2.3, 2.4, 2.5]))
    assert rising.a == 0
    assert rising.g == pytest.approx(2.25)
    assert rising.r_squared == pytest.approx(0)
    assert math.isnan(fit_power_law(CONTEXT, torch.full((6,), 2.0)).r_squared)


@pytest.mark.parametrize(
    ("loss", "determined"),
    [
        ((8 / CONTEXT) ** 0.5 + 2 + 0.003 * torch.tensor([1, -1, 1, -1, 1, -1]), True),
        ((8 / CONTEXT) ** 0.5 + 2 + 0.1 * torch.tensor([1, -1, 1, -1, 1, -1]), False),  # R² below 0.9
        (20 - 0.1 * CONTEXT.log(), False),  # a logarithm: the exponent could be 0
        (torch.tensor([3.0, 2, 2, 2, 2, 2.0001]), False),  # a step: the exponent could be infinite
        (torch.tensor([2.0, 2.1, 2.2, 2.3, 2.4, 2.5]), False),
    ],
)
def test_a_fit_is_determined_if_it_explains_the_loss_and_the_loss_bounds_the_exponent(loss, determined):
    fit = fit_power_law(CONTEXT, loss)
    assert fit.b_low <= fit.b <= fit.b_high
    assert fit.is_determined == determined


def test_the_interval_covers_the_exponent_in_95_of_100_samples_or_a_few_more():
    generator = torch.Generator().manual_seed(0)
    contexts = torch.logspace(1.3, 4, 12)
    fits = [
        fit_power_law(contexts, (50 / contexts) ** 0.6 + 2 + 0.02 * torch.randn(12, generator=generator))
        for _ in range(200)
    ]
    assert 0.94 < sum(fit.b_low <= 0.6 <= fit.b_high for fit in fits) / len(fits) < 1


@pytest.mark.parametrize(
    ("context", "loss", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], "3 different lengths"),
        ([1.0, 2.0, 2.0], [1.0, 2.0, 3.0], "3 different lengths"),
        ([0.0, 2.0, 3.0], [1.0, 2.0, 3.0], "above 0"),
        ([1.0, 2.0, 3.0], [1.0, math.nan, 3.0], "finite"),
        ([1.0, 2.0, 3.0], [1.0, 2.0], r"\[3\] and \[2\]"),
    ],
)
def test_what_cannot_be_fitted_is_refused(context, loss, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(torch.tensor(context), torch.tensor(loss))
