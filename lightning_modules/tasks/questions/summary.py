"""From the scores of single questions to what is reported.

Questions score from 0 to 1; everything here is in percent, as RULER reports it. What was not measured is missing from
the results, and never 0.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

RULER_THRESHOLD = 85.6
"""Score of Llama-2-7B (chat) at 4,096 tokens, averaged over RULER's 13 tasks (https://arxiv.org/abs/2404.06654)."""

Key = TypeVar("Key", bound=Hashable)


class Row(NamedTuple):
    """The score of one question.

    Attributes:
        task: Name of its task.
        length: Tokens it was made for.
        depth: Where in the text its answer stands, from 0 to 1; None if in many places.
        score: From 0 to 1.
    """

    task: str
    length: int
    depth: float | None
    score: float


class Score(NamedTuple):
    """The mean over some questions.

    Attributes:
        mean: In percent.
        error: Standard error of the mean, in percent; NaN for a single question.
        questions: How many there are.
    """

    mean: float
    error: float
    questions: int


class Matrix(NamedTuple):
    """Scores by length and depth.

    Attributes:
        lengths: ``[L]`` tokens, ascending.
        depths: ``[D]`` centres of the bins.
        scores: ``[L, D]`` means in percent, float64; NaN where nothing was measured.
    """

    lengths: list[int]
    depths: list[float]
    scores: NDArray[np.float64]


def task_scores(rows: Iterable[Row]) -> dict[tuple[str, int], Score]:
    """Mean score of each task at each length, by name and length.

    Example:
        >>> task_scores([Row("vt", 4096, None, 1.0), Row("vt", 4096, None, 0.5)])
        {('vt', 4096): Score(mean=75.0, error=25.0, questions=2)}
    """
    return _scores(rows, lambda row: (row.task, row.length))


def length_averages(rows: Iterable[Row]) -> dict[int, float]:
    """Average over tasks at each length, all tasks counting the same; in percent.

    A length is left out unless every task has been measured at it: other tasks make another average.

    Example:
        >>> length_averages([Row("vt", 4096, None, 1.0), Row("cwe", 4096, None, 0.5), Row("vt", 8192, None, 1.0)])
        {4096: 75.0}
    """
    scores = task_scores(rows)
    tasks = {task for task, _ in scores}
    lengths = sorted({length for _, length in scores})
    return {
        length: math.fsum(scores[task, length].mean for task in tasks) / len(tasks)
        for length in lengths
        if all((task, length) in scores for task in tasks)
    }


def effective_length(averages: Mapping[int, float], *, threshold: float = RULER_THRESHOLD) -> int | None:
    """RULER's effective length: the longest at which the average over tasks exceeds the threshold.

    "The maximum length exceeding the threshold" (Section 4); shorter ones need not exceed it, though in the paper they
    always do. With tasks or models other than RULER's, the threshold is only a convention.

    Args:
        averages: Average score by length, in percent, such as `length_averages`.
        threshold: What has to be exceeded, in percent.

    Returns:
        Tokens; None if no length will do.

    Example:
        >>> effective_length({4096: 95.5, 8192: 93.8, 16384: 91.6, 32768: 87.4, 65536: 84.7, 131072: 77.0})
        32768
    """
    return max((length for length, average in averages.items() if average > threshold), default=None)


def weighted_average(averages: Mapping[int, float], *, increasing: bool) -> float:
    """RULER's ``wAvg. (inc)`` and ``wAvg. (dec)``: lengths weigh 1, 2, 3 .. in ascending or in descending order.

    Args:
        averages: Average score by length, in percent, such as `length_averages`. Only the same lengths make
            comparable weighted averages.
        increasing: Whether longer texts weigh more.

    Returns:
        Percent; NaN without any length.

    Example:
        >>> scores = {4096: 96.5, 8192: 95.8, 16384: 95.4, 32768: 94.8, 65536: 88.4, 131072: 66.6}
        >>> round(weighted_average(scores, increasing=True), 1), round(weighted_average(scores, increasing=False), 1)
        (85.5, 93.7)
    """
    if not averages:
        return math.nan
    weights = range(1, len(averages) + 1)
    total = math.fsum(weight * averages[length] for weight, length in zip(weights, sorted(averages), strict=True))
    plain = math.fsum(averages.values())
    weighted = total if increasing else (len(averages) + 1) * plain - total
    return weighted / sum(weights)


def position_curve(rows: Iterable[Row], *, bins: int = 11) -> dict[float, Score]:
    """Mean score by depth: the U-shaped curve of *Lost in the Middle* (https://arxiv.org/abs/2307.03172).

    Args:
        rows: Questions, those of one task and length or of several; such as have no depth are left out.
        bins: Evenly spaced depths from 0 to 1; each question counts for the nearest. 2 or more.

    Returns:
        By depth, ascending; depths without a question are left out.

    Raises:
        ValueError: If there are fewer than 2 bins, or a depth is not from 0 to 1.
    """
    centres = _centres(bins)
    scores = _scores((row for row in rows if row.depth is not None), lambda row: _bin(row, bins))
    return {centres[number]: scores[number] for number in sorted(scores)}


def depth_matrix(rows: Iterable[Row], *, bins: int = 11) -> Matrix:
    """Mean score by length and depth: the heat map of Needle-in-a-Haystack.

    Args:
        rows: Questions; such as have no depth are left out.
        bins: As in `position_curve`.

    Raises:
        ValueError: As `position_curve`.
    """
    centres = _centres(bins)
    scores = _scores((row for row in rows if row.depth is not None), lambda row: (row.length, _bin(row, bins)))
    lengths = sorted({length for length, _ in scores})
    matrix = np.full((len(lengths), bins), np.nan)
    for (length, number), score in scores.items():
        matrix[lengths.index(length), number] = score.mean
    return Matrix(lengths, centres, matrix)


def _centres(bins: int) -> list[float]:
    if bins < 2:
        raise ValueError(f"`bins` are depths from 0 to 1: 2 or more, got {bins}.")
    return [number / (bins - 1) for number in range(bins)]


def _bin(row: Row, bins: int) -> int:
    """The nearest depth; of two that are equally near the deeper."""
    if row.depth is None or not 0 <= row.depth <= 1:
        raise ValueError(f"A depth is from 0 (front) to 1 (end), got {row.depth} for '{row.task}'.")
    return int(row.depth * (bins - 1) + 0.5)


def _scores(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Score]:
    groups: dict[Key, list[float]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row.score)
    return {name: _score(scores) for name, scores in groups.items()}


def _score(scores: list[float]) -> Score:
    values = 100 * np.asarray(scores, dtype=np.float64)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return Score(float(values.mean()), error, len(values))
