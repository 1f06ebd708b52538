"""Effect of the answer's position: the score at the best position minus the score at the worst."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.utilities.statistics import Interval, score_difference


class PositionGap(NamedTuple):
    """Score at the best position minus the score at the worst, in percentage points, with its 95% interval.

    ``best`` and ``worst`` are the requested depths with the highest and lowest mean over all questions (in a tie, the
    one nearest to the front), and ``best_score`` and ``worst_score`` these means in percent. Their difference is larger
    than ``gap``, because it also contains the noise in their selection.
    """

    gap: float
    interval: Interval
    best: float
    worst: float
    best_score: float
    worst_score: float


def position_gaps(table: pd.DataFrame) -> dict[tuple[str, int], PositionGap]:
    """Return the gap for each task and length at which two or more questions were asked at several requested depths.

    Args:
        table: A row for each question, with ``task``, ``length``, ``asked_depth``, ``index`` and a ``score`` from 0 to
            1. Questions that lack a depth, in an evaluation that is not complete, do not count.
    """
    found = {}
    requested = table[table["asked_depth"].notna()]
    for (task, length), rows in requested.groupby(["task", "length"], sort=False):
        grid = rows.pivot_table(index="index", columns="asked_depth", values="score").dropna()
        if grid.shape[0] < 2 or grid.shape[1] < 2:
            continue
        scores = grid.to_numpy(dtype=np.float64)
        gap, (low, high) = measure_gap(scores)
        means = scores.mean(axis=0)
        best = int(means.argmax())
        worst = int(means.argmin())
        depths = grid.columns.to_numpy(dtype=np.float64)
        found[task, int(length)] = PositionGap(
            gap=100 * gap,
            interval=(100 * low, 100 * high),
            best=float(depths[best]),
            worst=float(depths[worst]),
            best_score=100 * float(means[best]),
            worst_score=100 * float(means[worst]),
        )
    return found


def measure_gap(scores: NDArray[np.float64]) -> tuple[float, Interval]:
    """Return the mean score at the best position minus that at the worst, with its 95% interval.

    The largest of several noisy means minus the smallest would be too large: 35 points on average for 20 questions at
    11 positions, each right with probability 1/2. So one half of the questions chooses the two positions, the other
    half measures their difference, and the result is the mean over both ways. Its expectation is at most the true
    difference, and 0 if positions do not matter. The interval is the mean of the halves' `score_difference` intervals,
    which pair the scores of each question, so it is as wide as if the halves were fully dependent: each chooses for
    the other one. Where positions do not matter, it covers 0 in 96 to 100% of simulations.

    Args:
        scores: ``[N, D]`` scores from 0 to 1 of the same N >= 2 questions at D positions.
    """
    halves = scores[0::2], scores[1::2]
    gaps = []
    intervals = []
    for chooser, measured in (halves, halves[::-1]):
        means = chooser.mean(axis=0)
        gap, interval = score_difference(measured[:, means.argmax()], measured[:, means.argmin()])
        assert interval is not None, "each question has its own text"
        gaps.append(gap)
        intervals.append(interval)
    low, high = np.mean(intervals, axis=0)
    return float(np.mean(gaps)), (float(low), float(high))
