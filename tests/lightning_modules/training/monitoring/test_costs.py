"""Tokens, time and memory of training."""

import time

import pytest

from lightning_modules.training.monitoring.costs import StepCosts


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def pass_seconds(seconds):
        now[0] += seconds

    return pass_seconds


def step(step_costs, clock, *, tokens=1000, processes=1):
    """Two batches of 4 seconds each; the loader takes 1 second for the second one."""
    step_costs.on_train_batch_start()
    clock(4)
    step_costs.on_train_batch_end()
    clock(1)
    step_costs.on_train_batch_start()
    clock(4)
    values = step_costs.end_step(tokens, processes)
    step_costs.on_train_batch_end()
    return {name: float(value) for name, value in values.items()}


def test_costs_add_up_and_are_continued_by_a_resumed_run(clock):
    first = StepCosts()
    values = step(first, clock, processes=4)
    assert values == {"tokens": 1000, "gpu_hours": 36 / 3600, "tokens_per_second": 1000 / 9, "data_wait": 1 / 9}
    clock(1)  # until the first batch of the next step: the optimizer is part of its time
    assert step(first, clock)["data_wait"] == 2 / 10
    second = StepCosts()
    second.totals |= first.totals
    assert step(second, clock)["tokens"] == 3000
    assert second.totals["gpu_hours"] == pytest.approx((36 + 10 + 9) / 3600)


def test_an_evaluation_costs_no_training_time_and_is_no_wait(clock):
    step_costs = StepCosts()
    step(step_costs, clock)
    step_costs.stop_clock()
    clock(1000)
    values = step(step_costs, clock)
    assert values["data_wait"] == 1 / 9
    assert values["tokens_per_second"] == 1000 / 9


def test_mfu_counts_the_tokens_of_the_step(clock):
    step_costs = StepCosts()
    step_costs.peak_seconds_per_token = 6e-3
    assert step(step_costs, clock)["mfu"] == pytest.approx(6 / 9)
    assert step(step_costs, clock, tokens=500)["mfu"] == pytest.approx(3 / 9)
