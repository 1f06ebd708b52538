"""A few of the faults of `tests.support.faults`, which makes each of them happen as often as it is asked to."""

import pytest

from tests.support.fault_runs import HANGS
from tests.support.faults import table
from tests.support.forks import call

REMEDIES = ("--ckpt_path", "newest intact one", "longce plan", "lower the learning rate")


@pytest.mark.slow
def test_what_faults_leave_behind(tmp_path):
    outcomes = call(table, tmp_path, 1, slice(1, 6))  # `test_resume.py` has the first one
    assert len(outcomes) == 5
    for outcome in outcomes:
        assert outcome.wrong == [], outcome.fault
        assert outcome.trials > 0, outcome.fault
        # By SIGTERM the open batch, if an evaluation amid a step is stopped.
        assert outcome.lost <= (1 if "SIGTERM" in outcome.fault else 4), outcome.fault
        assert outcome.seconds < HANGS, outcome.fault
        if not outcome.fault.startswith("kill -9 in"):
            assert any(remedy in outcome.message for remedy in REMEDIES), outcome.message


@pytest.mark.long
@pytest.mark.slow
def test_what_all_faults_leave_behind(record_property, tmp_path):
    outcomes = call(table, tmp_path, 5, slice(None))
    record_property("faults", len(outcomes))
    record_property("trials", sum(outcome.trials for outcome in outcomes))
    record_property("wrong", sum(len(outcome.wrong) for outcome in outcomes))
    assert len(outcomes) > 15
    assert [outcome.wrong for outcome in outcomes if outcome.wrong] == []
