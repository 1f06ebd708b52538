import math

import pytest
import torch

from lightning_modules.functional import fit_power_law

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
    ("context", "loss", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], "at least 3 context lengths, got 2"),
        ([1.0, 2.0, 2.0], [1.0, 2.0, 3.0], "got 2"),
        ([0.0, 2.0, 3.0], [1.0, 2.0, 3.0], "above 0"),
        ([1.0, 2.0, 3.0], [1.0, math.nan, 3.0], "finite"),
        ([1.0, 2.0, 3.0], [1.0, 2.0], r"\[3\] and \[2\]"),
    ],
)
def test_what_cannot_be_fitted_is_refused(context, loss, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(torch.tensor(context), torch.tensor(loss))
