import math
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lightning_modules.tasks.evaluation.answers import Answer
from lightning_modules.tasks.evaluation.summary import (
    depth_matrix,
    effective_length,
    length_averages,
    mean_scores,
    suggest_questions,
    summarize,
    weighted_average,
)
from lightning_modules.tasks.questions.registry import GROUPS


class Row(NamedTuple):
    task: str
    length: int
    depth: float | None
    score: float


def table(rows):
    """One question per text."""
    return pd.DataFrame(rows, columns=Row._fields).assign(index=range(len(rows)))


LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072]
PUBLISHED = [  # RULER's table: effective length, scores, weighted averages (inc), (dec)
    (131072, (96.7, 95.8, 96.0, 95.9, 95.9, 94.4), 95.5, 96.1),
    (65536, (96.6, 96.3, 95.2, 93.2, 87.0, 81.2), 89.0, 94.1),
    (65536, (96.5, 95.8, 95.4, 94.8, 88.4, 66.6), 85.5, 93.7),
    (65536, (96.4, 96.3, 95.3, 94.0, 85.9, 48.1), 79.5, 92.5),
    (16384, (95.1, 94.4, 90.8, 85.4, 80.9, 72.1), 82.6, 90.3),
    (16384, (92.8, 90.3, 85.7, 79.9, 76.3, 69.5), 78.5, 86.3),
    (4096, (88.1, 85.5, 84.5, 82.7, 75.5, 68.9), 77.8, 83.9),
    (8192, (94.9, 93.8, 78.0, 67.8, 0.0, 0.0), 37.5, 74.0),
    (None, (82.3, 78.4, 73.7, 69.1, 68.1, 65.0), 69.9, 75.7),
]


@pytest.mark.parametrize(("longest", "scores", "increasing", "decreasing"), PUBLISHED)
def test_matches_the_published_table(longest, scores, increasing, decreasing):
    averages = dict(reversed(list(zip(LENGTHS, scores, strict=True))))  # the order in which they come does not matter
    assert effective_length(averages) == longest
    assert weighted_average(averages, increasing=True) == pytest.approx(increasing, abs=0.051)
    assert weighted_average(averages, increasing=False) == pytest.approx(decreasing, abs=0.051)


def test_only_the_longest_length_must_exceed_the_threshold():
    assert effective_length({4096: 85.6}) is None
    assert effective_length({4096: 80.0, 8192: 85.7}) == 8192
    assert effective_length({4096: 80.0, 8192: 85.7}, threshold=79.4) == 8192
    assert effective_length({}) is None


def test_means_and_intervals_match_wilson():
    scores = [1.0, 0.5, 0.5, 0.0, 1.0]
    rows = [Row("vt", 4096, None, score) for score in scores] + [Row("cwe", 8192, 0.5, 0.25)]
    found = mean_scores(table(rows))
    low, high = stats.binomtest(3, 5).proportion_ci(method="wilson")
    assert found["vt", 4096].mean == pytest.approx(60)
    assert found["vt", 4096].interval == pytest.approx((100 * low, 100 * high))
    assert found["vt", 4096].questions == 5
    assert found["cwe", 8192].mean == 25
    assert set(found) == {("vt", 4096), ("cwe", 8192)}


def test_depths_of_one_text_are_dependent():
    rows = table([Row("needle", 4096, depth / 10, float(number < 5)) for number in range(10) for depth in range(11)])
    rows["index"] = [number for number in range(10) for _ in range(11)]
    wide, narrow = mean_scores(rows)["needle", 4096], mean_scores(rows.assign(index=range(110)))["needle", 4096]
    assert wide.mean == narrow.mean == 50
    assert wide.interval[1] - wide.interval[0] > 2.5 * (narrow.interval[1] - narrow.interval[0])
    assert suggest_questions({(): narrow}) == pytest.approx(110 * ((narrow.interval[1] - 50) / 5) ** 2, abs=1)


def test_only_ruler_has_an_effective_length():
    results = [
        Answer(task, length, None, index, None, float(length == 4096 or index < 17), ("a",), "a", 9)
        for task in GROUPS["ruler"]
        for length in (4096, 8192)
        for index in range(20)
    ]
    summary = summarize(results)
    assert summary.effective_length == (4096, 4096, 8192)  # the average at 8192 is 85%
    assert summary.logged()["effective_length"] == 4096
    low, high = summary.average_intervals[8192]
    assert low < summary.averages[8192] < high
    assert summarize(results[:-40]).effective_length is None  # without one of the tasks


def test_averages_weigh_tasks_equally_and_need_all_of_them():
    rows = [Row("vt", 4096, None, 1.0)] * 9 + [Row("cwe", 4096, None, 0.0)]
    assert length_averages(table(rows)) == {4096: 50}
    assert length_averages(table([*rows, Row("vt", 8192, None, 1.0)])) == {4096: 50}
    assert length_averages(table([])) == {}
    assert math.isnan(weighted_average({}, increasing=True))


def test_questions_count_at_the_nearest_depth():
    rows = [
        Row("needle", 4096, depth, score)
        for depth, score in [(0, 1.0), (0.04, 0.0), (0.06, 1.0), (0.5, 0.5), (0.96, 0.0), (1, 0.0), (None, 1.0)]
    ] + [Row("needle", 8192, 0.5, 1.0)]
    assert depth_matrix(table(rows), bins=2).depths == [0, 1]
    matrix = depth_matrix(table(rows))
    assert matrix.lengths == [4096, 8192]
    assert matrix.depths == pytest.approx(np.linspace(0, 1, 11))
    expected = np.full((2, 11), np.nan)
    expected[0, [0, 1, 5, 10]] = [50, 100, 50, 0]
    expected[1, 5] = 100
    np.testing.assert_array_equal(matrix.scores, expected)
    low, high = stats.binomtest(0, 2).proportion_ci(method="wilson")
    assert [matrix.low[0, 10], matrix.high[0, 10]] == pytest.approx([100 * low, 100 * high])
    assert np.isnan(matrix.low[0, 3])


def test_evenly_spaced_depths_have_bins_of_their_own():
    for bins in (2, 5, 11, 21, 40):
        rows = [Row("needle", 4096, number / (bins - 1), number / 100) for number in range(bins)]
        assert depth_matrix(table(rows), bins=bins).scores.tolist() == [pytest.approx(list(range(bins)))]


def test_logged_names_of_options_have_no_characters_that_mlflow_refuses():
    answers = [
        Answer("vt(hops=8,chains=2)", 4096, None, 0, score=1.0),
        Answer("fwe(alpha=2.5)", 4096, None, 0, score=0.0),
    ]
    logged = summarize(answers).logged()
    assert logged["vt_hops_8_chains_2/4096"] == 100
    assert logged["fwe_alpha_2.5/4096"] == 0
