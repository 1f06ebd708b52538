import pytest
import torch

from lightning_modules.functional import soft_influence
from lightning_modules.objectives import CrossEntropy, LongCE


def test_influences():
    long, short = -torch.rand(2, 5), -3 * torch.rand(2, 5)
    assert torch.equal(CrossEntropy().influence(long, short), torch.ones(2, 5))
    assert torch.equal(LongCE(2.0).influence(long, short), soft_influence(long, short, gamma=2.0))


@pytest.mark.parametrize("gamma", [0.5, -1.0, float("nan"), float("inf")])
def test_gamma_is_checked_when_the_objective_is_made(gamma):
    with pytest.raises(ValueError, match="gamma"):
        LongCE(gamma)
