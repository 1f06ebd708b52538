"""Summarize the scores of questions (0 to 1) in percent. Questions without an answer do not count as 0."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightning_modules.tasks.evaluation.answers import Answer
from lightning_modules.tasks.evaluation.evaluator import EvaluatorAccuracy, measure_evaluator
from lightning_modules.tasks.evaluation.positions import PositionGap, position_gaps
from lightning_modules.tasks.evaluation.questions import even_depths
from lightning_modules.tasks.questions.registry import GROUPS
from lightning_modules.utilities.statistics import (
    Interval,
    in_percent,
    mean_interval,
    questions_needed,
    score_interval,
)

RULER_THRESHOLD = 85.6
"""Score of Llama-2-7B (chat) at 4,096 tokens, averaged over RULER's 13 tasks (https://arxiv.org/abs/2404.06654)."""

Cells = dict[tuple[str, str], tuple[float, Interval | None]]
"""Scores with their 95% intervals, by task or set and by length or metric; NaN if a score is not a number."""

BINS = 11  # depths of heat maps and curves if no depths were requested


class Score(NamedTuple):
    """Mean score and its 95% interval in percent (None if all questions are of one text), and the number of questions.

    Questions with the same index share their text, with the answer at different depths.
    """

    mean: float
    interval: Interval | None
    questions: int


class EffectiveLength(NamedTuple):
    """RULER's effective length, and those of the lower and upper ends of the averages' 95% intervals.

    None if no length exceeds the threshold.
    """

    length: int | None
    low: int | None
    high: int | None


class Matrix(NamedTuple):
    """``[L, D]`` mean scores in percent, the ends of their 95% intervals (NaN if unknown) and numbers of questions.

    Rows are lengths, columns depths.
    """

    lengths: list[int]
    depths: list[float]
    scores: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    questions: NDArray[np.int64]


class Perplexities(NamedTuple):
    """Perplexities of answer tokens and of all other tokens, under teacher forcing."""

    answer_perplexity: float
    other_perplexity: float


@dataclass(frozen=True)
class Summary:
    """Scores in percent by task and length, and perplexities under teacher forcing.

    A length has an average only if all tasks were measured at it. The effective length is defined only for all of
    RULER's tasks, because its threshold is RULER's. Perplexities are by task and length: the task None covers all
    tasks, as in Figure 2 and Table 9 of Fang et al. (2025), and (None, None) covers all questions. Heat maps are by
    task, after the one for ``all`` tasks; if depths were requested, ``all`` omits tasks without depths, because they
    could favor one depth. Position gaps, by task and length, exist only if depths were requested. ``as_evaluator`` is
    by task and length, in the mode ``key_tokens``. ``seconds`` are summed over all processes. ``missing`` is the
    number of questions without an answer.
    """

    scores: dict[tuple[str, int], Score]
    averages: dict[int, float]
    average_intervals: dict[int, Interval | None]
    effective_length: EffectiveLength | None
    weighted_inc: float
    weighted_dec: float
    perplexities: dict[tuple[str | None, int | None], Perplexities]
    heat_maps: dict[str, Matrix]
    as_evaluator: dict[tuple[str, int], EvaluatorAccuracy]
    position_gaps: dict[tuple[str, int], PositionGap]
    seconds: float
    questions: int
    missing: int

    def logged(self) -> dict[str, float]:
        """Return the values to log, by their names after ``tasks/``; options of tasks are written with underscores."""
        values = {}
        for (task, length), score in self.scores.items():
            values[f"{_log_name(task)}/{length}"] = score.mean
        for length, average in self.averages.items():
            values[f"average/{length}"] = average
        if self.averages:
            values |= {"weighted_inc": self.weighted_inc, "weighted_dec": self.weighted_dec}
        if self.effective_length is not None:
            values["effective_length"] = float(self.effective_length.length or 0)
        for (of_task, of_length), found in self.perplexities.items():
            if of_task is None:
                ending = "" if of_length is None else f"/{of_length}"
                values[f"answer_perplexity{ending}"] = found.answer_perplexity
                values[f"other_perplexity{ending}"] = found.other_perplexity
        return values

    def cells(self) -> Cells:
        """Return the scores by task and length, and those of the average of several tasks."""
        cells: Cells = {}
        for (task, length), score in self.scores.items():
            cells[task, str(length)] = (score.mean, score.interval)
        for length, average in self.averages.items():
            cells["average", str(length)] = (average, self.average_intervals[length])
        return cells


def _log_name(task: str) -> str:
    """Return ``vt_hops_8_chains_2`` for ``vt(hops=8,chains=2)``: MLflow refuses such characters in names."""
    return task.translate(str.maketrans("(=,", "___", ")"))


def tabulate(answers: Sequence[Answer]) -> pd.DataFrame:
    """Return a table with a row for each question that has an answer, and a column for each field."""
    rows = [vars(answer) for answer in answers if not math.isnan(answer.score)]
    return pd.DataFrame(rows, columns=list(Answer.__dataclass_fields__))


def summarize(answers: Sequence[Answer]) -> Summary:
    """Summarize answers, of all questions or not."""
    table = tabulate(answers)
    # Depths that were asked for are the same at all lengths; true depths are those that whole sentences allow.
    table["depth"] = table["asked_depth"].astype(float).fillna(table["depth"].astype(float))
    asked = sorted(table["asked_depth"].dropna().unique())
    bins = BINS
    if len(asked) > 1 and asked == even_depths(len(asked)):
        bins = len(asked)
    with_depth = table[table["depth"].notna()]
    heat_maps = {}
    if with_depth["task"].nunique() > 1:
        together = table[table["asked_depth"].notna()] if asked else table
        heat_maps["all"] = depth_matrix(together, bins=bins)
    for task, rows in with_depth.groupby("task", sort=False):
        heat_maps[task] = depth_matrix(rows, bins=bins)
    scores = mean_scores(table)
    averages = length_averages(table)
    intervals = {length: _average_interval(scores, length) for length in averages}
    forced = table[table["answer_nll"].notna() | (table["answer_tokens"] > 0)]
    perplexities: dict[tuple[str | None, int | None], Perplexities] = {}
    if len(forced):
        perplexities[None, None] = _compute_perplexities(forced)
    for length, rows in forced.groupby("length", sort=False):
        perplexities[None, length] = _compute_perplexities(rows)
    for place, rows in forced.groupby(["task", "length"], sort=False):
        perplexities[place] = _compute_perplexities(rows)
    ruler_length = None
    if set(table["task"]) == set(GROUPS["ruler"]):
        ruler_length = _ruler_length(averages, intervals)
    return Summary(
        scores=scores,
        averages=averages,
        average_intervals=intervals,
        effective_length=ruler_length,
        weighted_inc=weighted_average(averages, increasing=True),
        weighted_dec=weighted_average(averages, increasing=False),
        perplexities=perplexities,
        heat_maps=heat_maps,
        as_evaluator=measure_evaluator(answers),
        position_gaps=position_gaps(table),
        seconds=math.fsum(table["seconds"]),
        questions=len(table),
        missing=len(answers) - len(table),
    )


def length_averages(table: pd.DataFrame) -> dict[int, float]:
    """Return the average over tasks, in percent, for each length at which every task was measured."""
    means = table.pivot_table(index="length", columns="task", values="score", aggfunc="mean").dropna()
    return {int(length): 100 * float(mean) for length, mean in means.mean(axis=1).items()}


def effective_length(averages: Mapping[int, float], *, threshold: float = RULER_THRESHOLD) -> int | None:
    """Return RULER's effective length: the longest at which the average over tasks exceeds the threshold, in percent.

    "The maximum length exceeding the threshold" (Section 4); shorter ones need not exceed it. None if no length does.
    """
    return max((length for length, average in averages.items() if average > threshold), default=None)


def weighted_average(averages: Mapping[int, float], *, increasing: bool) -> float:
    """Return RULER's ``wAvg. (inc)`` or ``wAvg. (dec)``: lengths weigh 1, 2, 3 .. in ascending or descending order.

    Averages are comparable only for the same lengths; NaN without lengths.
    """
    if not averages:
        return math.nan
    values = [averages[length] for length in sorted(averages, reverse=not increasing)]
    return float(np.average(values, weights=range(1, len(values) + 1)))


def suggest_questions(scores: Mapping[tuple[str, int], Score], *, points: float = 5.0) -> int | None:
    """Return how many questions of a task and length make every interval as narrow as ``points`` to each side."""
    needed = []
    for score in scores.values():
        if score.interval is None:
            continue
        needed.append(questions_needed(score.interval, score.questions, points))
    return max(needed, default=None)


def depth_matrix(table: pd.DataFrame, *, bins: int = BINS) -> Matrix:
    """Return the mean score by length and depth: the heat map of Needle-in-a-Haystack.

    Each question with a ``depth`` counts in the nearest of the evenly spaced bins, the deeper one in a tie. The rows
    are the U-shaped curves of *Lost in the Middle* (https://arxiv.org/abs/2307.03172).
    """
    table = table[table["depth"].notna()]
    table = table.assign(bin=(table["depth"].astype(float) * (bins - 1) + 0.5).astype(int))
    lengths = sorted(table["length"].unique())
    values = np.full((3, len(lengths), bins), math.nan)
    questions = np.zeros((len(lengths), bins), dtype=np.int64)
    for (length, place), rows in table.groupby(["length", "bin"]):
        score = _mean_score(rows)
        values[:, lengths.index(length), place] = [score.mean, *(score.interval or (math.nan, math.nan))]
        questions[lengths.index(length), place] = len(rows)
    scores, low, high = values
    return Matrix([int(length) for length in lengths], even_depths(bins), scores, low, high, questions)


def mean_scores(table: pd.DataFrame) -> dict[tuple[str, int], Score]:
    """Return mean scores by task and length of a table with a ``score`` from 0 to 1 for each question."""
    return {key: _mean_score(rows) for key, rows in table.groupby(["task", "length"], sort=False)}


def _mean_score(rows: pd.DataFrame) -> Score:
    # Each task has its own texts. The pairs are numbered, because numpy cannot sort pairs.
    texts = pd.MultiIndex.from_frame(rows[["task", "index"]]).factorize()[0].tolist()
    interval = score_interval(rows["score"], texts)
    return Score(100 * float(rows["score"].mean()), in_percent(interval), len(rows))


def _average_interval(scores: Mapping[tuple[str, int], Score], length: int) -> Interval | None:
    means = []
    intervals = []
    for (_, other), score in scores.items():
        if other == length:
            means.append(score.mean)
            intervals.append(score.interval)
    return mean_interval(means, intervals)


def _ruler_length(averages: Mapping[int, float], intervals: Mapping[int, Interval | None]) -> EffectiveLength:
    # without an interval, the average itself
    low = dict(averages)
    high = dict(averages)
    for length, interval in intervals.items():
        if interval is not None:
            low[length], high[length] = interval
    return EffectiveLength(effective_length(averages), effective_length(low), effective_length(high))


def _compute_perplexities(table: pd.DataFrame) -> Perplexities:
    """Return the perplexities of forced answers, over all tokens: each token counts the same."""

    def perplexity(kind: str) -> float:
        tokens = int(table[f"{kind}_tokens"].sum())
        nll = float(table[f"{kind}_nll"].astype(float).sum(skipna=False))
        with np.errstate(over="ignore"):  # infinity for a model that has diverged
            return float(np.exp(nll / tokens)) if tokens else math.nan

    return Perplexities(perplexity("answer"), perplexity("other"))
