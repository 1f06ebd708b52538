import pytest
import torch

from lightning_modules.functional import soft_influence
from lightning_modules.objectives import CrossEntropy, LongCE, StoredInfluence, check_cap, check_influence


def test_influences():
    long, short = -torch.rand(2, 5), -3 * torch.rand(2, 5)
    assert torch.equal(CrossEntropy().influence(long, short), torch.ones(2, 5))
    assert torch.equal(LongCE(2.0).influence(long, short), soft_influence(long, short, gamma=2.0))


@pytest.mark.parametrize("gamma", [0.5, -1.0, float("nan"), float("inf")])
def test_gamma_is_checked_when_the_objective_is_made(gamma):
    with pytest.raises(ValueError, match="gamma"):
        LongCE(gamma)


def test_stored_influence_is_taken_as_it_is_and_capped():
    stored = torch.tensor([0.5, 1.0, 3.0, 5.0])
    assert StoredInfluence(3.0).influence(-torch.rand(4), stored).tolist() == [0.5, 1.0, 3.0, 3.0]
    with pytest.raises(ValueError, match="gamma"):
        StoredInfluence(0.5)


def test_stored_influence_and_its_objective_belong_together():
    check_influence(StoredInfluence(), "in 'x'")
    check_influence(LongCE(), None)
    with pytest.raises(ValueError, match=r"StoredInfluence takes stored.*`longce influence`.*`data.influence`"):
        check_influence(StoredInfluence(), None)
    with pytest.raises(ValueError, match=r"LongCE would ignore the stored token weights in 'x'"):
        check_influence(LongCE(), "in 'x'")


def test_stored_weights_capped_lower_than_the_objective_says_are_refused():
    check_cap(StoredInfluence(gamma=5.0), 5.0)
    check_cap(StoredInfluence(gamma=2.0), 5.0)
    check_cap(LongCE(gamma=5.0), None)
    with pytest.raises(ValueError, match=r"capped at 2, below the `gamma` 5"):
        check_cap(StoredInfluence(gamma=5.0), 2.0)
