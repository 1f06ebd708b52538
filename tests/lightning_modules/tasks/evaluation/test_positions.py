import itertools
import math

import numpy as np
import pandas as pd
import pytest

from lightning_modules.tasks.evaluation.positions import measure_gap, position_gaps
from lightning_modules.utilities.statistics import score_difference


def questions(grid, *, task="qa", length=1024):
    """A row for each cell of ``[N, D]`` scores; NaN cells have no answer."""
    rows = []
    for index, scores in enumerate(grid):
        for place, score in enumerate(scores):
            if not math.isnan(score):
                rows.append({"task": task, "length": length, "asked_depth": place / 4, "index": index, "score": score})
    return pd.DataFrame(rows)


#           depth 0    0.25 0.5  0.75
GRID = [
    [1.0, 1.0, 0.0, 0.0],
    [1.0, 0.0, 0.0, 0.5],
    [1.0, 0.0, 1.0, 0.0],
    [0.0, 1.0, 0.0, 1.0],
]


def test_one_half_chooses_and_the_other_measures():
    # Questions 0 and 2 choose depth 0 (2 of 2) and 0.75 (0 of 2): the others have (1 + 0) / 2 - (0.5 + 1) / 2.
    # Questions 1 and 3 choose 0.75 (1.5 of 2) and 0.5 (0 of 2): the others have 0 / 2 - 1 / 2.
    gap, (low, high) = measure_gap(np.array(GRID))
    assert gap == pytest.approx((-0.25 - 0.5) / 2)
    first = score_difference([1.0, 0.0], [0.5, 1.0])[1]
    second = score_difference([0.0, 0.0], [0.0, 1.0])[1]
    assert (low, high) == pytest.approx(((first[0] + second[0]) / 2, (first[1] + second[1]) / 2))
    # Over all questions, 0 is best (3 of 4); 0.5 is worst (1 of 4).
    found = position_gaps(questions(GRID))["qa", 1024]
    assert found.gap == pytest.approx(-37.5)
    assert found.interval == pytest.approx((100 * low, 100 * high))
    assert (found.best, found.worst, found.best_score, found.worst_score) == (0, 0.5, 75, 25)


def test_the_expectation_is_exact_where_positions_do_not_matter():
    # All answers of 2 questions at 3 positions, equally likely: the plain range averages 56 points, the gap 0.
    grids = [np.array(cells, dtype=float).reshape(2, 3) for cells in itertools.product((0, 1), repeat=6)]
    assert np.mean([measure_gap(grid)[0] for grid in grids]) == pytest.approx(0, abs=1e-12)
    assert np.mean([np.ptp(grid.mean(axis=0)) for grid in grids]) == 0.5625


def test_a_clear_gap_is_measured_and_covered():
    rng = np.random.default_rng(0)
    right = np.array([0.9, 0.5, 0.2, 0.5, 0.9])
    gaps = []
    covered = 0
    for _ in range(200):
        gap, (low, high) = measure_gap((rng.random((100, 5)) < right).astype(float))
        gaps.append(gap)
        covered += low <= 0.7 <= high
    assert np.mean(gaps) == pytest.approx(0.7, abs=0.015)  # four standard errors
    assert covered >= 190


def test_intervals_cover_zero_where_positions_do_not_matter():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        low, high = measure_gap((rng.random((20, 11)) < 0.5).astype(float))[1]
        covered += low <= 0 <= high
    assert covered >= 380  # 95%; a plain paired interval of the best and the worst position: 43%


def test_only_questions_at_all_depths_count():
    complete = position_gaps(questions(GRID))
    assert position_gaps(questions([*GRID, [math.nan, 1.0, 1.0, 1.0]])) == complete
    others = questions(GRID, task="other").assign(asked_depth=None)
    assert position_gaps(pd.concat([questions(GRID), others])) == complete
    assert position_gaps(others) == {}
    assert position_gaps(questions(GRID[:1])) == {}
    assert position_gaps(questions([row[:1] for row in GRID])) == {}


def test_tasks_and_lengths_have_gaps_of_their_own():
    up = [[0.0, 1.0]] * 20
    tables = [questions(up), questions(up, length=2048), questions([row[::-1] for row in up], task="other")]
    found = position_gaps(pd.concat(tables))
    assert list(found) == [("qa", 1024), ("qa", 2048), ("other", 1024)]
    assert all(gap.gap == 100 for gap in found.values())
    assert (found["qa", 2048].best, found["other", 1024].best) == (0.25, 0)
