"""A few of the faults of `tests.support.faults`, which makes each of them happen as often as it is asked to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fault_runs import HANGS

ROOT = Path(__file__).parents[2]
REMEDIES = ("--ckpt_path", "newest intact one", "longce plan", "lower the learning rate")


def outcome(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.faults", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]


@pytest.mark.slow
def test_what_faults_leave_behind():
    rows = outcome("1", "quick")
    assert len(rows) == 6
    for fault, trials, wrong, lost, seconds, message in rows:
        assert (int(trials) > 0, wrong) == (True, "0"), fault
        # By SIGTERM the open batch, if an evaluation amid a step is stopped.
        assert int(lost) <= (1 if "SIGTERM" in fault else 4), fault
        assert float(seconds) < HANGS, fault
        if not fault.startswith("kill -9 in"):
            assert any(remedy in message for remedy in REMEDIES), message


@pytest.mark.long
@pytest.mark.slow
def test_what_all_faults_leave_behind(record_property):
    rows = outcome("5")
    record_property("faults", len(rows))
    record_property("trials", sum(int(trials) for _, trials, *_ in rows))
    record_property("wrong", sum(int(wrong) for _, _, wrong, *_ in rows))
    assert len(rows) > 15
    assert all(wrong == "0" for _, _, wrong, *_ in rows)
