"""Tokens, time and memory of training."""

import time

import pytest

from lightning_modules.training.monitoring import costs
from lightning_modules.training.monitoring.costs import PlannedStep, StepCosts, compare_with_plan

PLAN = PlannedStep(tokens=1000, flops=6e12, peak_flops=1e12, seconds=(10.0, 14.0), memory=40.0)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def pass_seconds(seconds):
        now[0] += seconds

    return pass_seconds


def step(step_costs, clock, *, tokens=1000, processes=1):
    """Two batches of 4 seconds each; the loader takes 1 second for the second one."""
    step_costs.start_batch()
    clock(4)
    step_costs.end_batch()
    clock(1)
    step_costs.start_batch()
    clock(4)
    values = step_costs.end_step(tokens, processes)
    step_costs.end_batch()
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


def test_mfu_counts_the_tokens_of_the_step_and_the_comparison_is_logged_once(clock, monkeypatch):
    lines = []
    monkeypatch.setattr(costs, "rank_zero_info", lines.append)
    step_costs = StepCosts()
    step_costs.planned = PLAN
    assert step(step_costs, clock)["mfu"] == pytest.approx(6 / 9)
    assert step(step_costs, clock, tokens=500)["mfu"] == pytest.approx(3 / 9)
    for _ in range(6):
        step(step_costs, clock)
    assert lines == [compare_with_plan(PLAN, [9.0] * 5, {"data_wait": 1 / 9})]


@pytest.mark.parametrize(
    ("seconds", "memory", "is_near"),
    [(12.0, 42.0, True), (17.0, 42.0, True), (18.0, 42.0, False), (7.0, 42.0, False), (12.0, 51.0, False)],
)
def test_a_hint_follows_what_differs_by_more_than_a_quarter(seconds, memory, is_near):
    text = compare_with_plan(PLAN, [99.0, 99.0, *[seconds] * 3], {"peak_memory_gib": memory, "data_wait": 0.3})
    assert text.startswith(f"After 5 steps: {seconds:.3g} s per step (planned: 10 to 14 s), {memory} GiB")
    assert text.endswith("(planned: 40.0 GiB)." if is_near else "short documents are faster than planned.")
    assert ("waiting for data, 30%" in text) != is_near
