import pytest

from lightning_modules.objectives import LongCE, StoredInfluence
from lightning_modules.training.preflight import check_influence


def test_stored_weights_and_the_objective_fit_together():
    check_influence(LongCE(), None)
    check_influence(StoredInfluence(), "in 'weights'")
    with pytest.raises(ValueError, match=r"StoredInfluence needs stored token weights.*`longce influence`"):
        check_influence(StoredInfluence(), None)
    with pytest.raises(ValueError, match="LongCE would ignore the stored token weights in 'weights'"):
        check_influence(LongCE(), "in 'weights'")
