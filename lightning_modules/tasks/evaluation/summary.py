"""What is reported of the results of an evaluation, as numbers."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lightning_modules.tasks.evaluation.questions import even_depths
from lightning_modules.tasks.evaluation.runs import TaskResult
from lightning_modules.tasks.questions.summary import (
    Matrix,
    Row,
    Score,
    depth_matrix,
    effective_length,
    length_averages,
    position_curve,
    task_scores,
    weighted_average,
)

Key = TypeVar("Key", bound=Hashable)

BINS = 11
"""Depths of heat maps and curves where none were asked for."""


class Perplexities(NamedTuple):
    """Of forced answers.

    Attributes:
        answer: Of all tokens of answers together.
        other: Of all other tokens.
    """

    answer: float
    other: float


@dataclass(frozen=True)
class Summary:
    """Scores in percent, and perplexities where answers were forced.

    Attributes:
        scores: Mean score by task and length.
        averages: Average over the tasks by length; only of lengths at which all of them were put.
        effective_length: Longest length whose average exceeds RULER's threshold; None if none does.
        weighted_inc: Average over lengths, of which longer ones weigh more.
        weighted_dec: The same with the weights in reverse.
        perplexities: Over all questions; None if answers were generated.
        perplexities_by_length: The same by length, as Figure 2 and Table 9 of Fang et al. (2025) show them.
        perplexities_by_task: By task and length.
        heat_maps: Scores by length and depth of each task whose answers have one; under ``all`` of these together, if
            they are several. Where depths were asked for, those together are the tasks that have them: others would
            make one depth easier than the next.
        curves: Scores by depth of these together, for each length.
        seconds: Time that the questions took, over all processes.
        questions: Their number.
    """

    scores: dict[tuple[str, int], Score]
    averages: dict[int, float]
    effective_length: int | None
    weighted_inc: float
    weighted_dec: float
    perplexities: Perplexities | None
    perplexities_by_length: dict[int, Perplexities]
    perplexities_by_task: dict[tuple[str, int], Perplexities]
    heat_maps: dict[str, Matrix]
    curves: dict[int, dict[float, Score]]
    seconds: float
    questions: int

    def logged(self) -> dict[str, float]:
        """The numbers for a logger, by their names behind ``tasks/``."""
        values = {f"{task}/{length}": score.mean for (task, length), score in self.scores.items()}
        values |= {f"average/{length}": average for length, average in self.averages.items()}
        if self.averages:
            values |= {"effective_length": float(self.effective_length or 0)}
            values |= {"weighted_inc": self.weighted_inc, "weighted_dec": self.weighted_dec}
        if self.perplexities is not None:
            values |= _named(self.perplexities)
        for length, found in self.perplexities_by_length.items():
            values |= {f"{name}/{length}": value for name, value in _named(found).items()}
        return values

    def as_json(self) -> dict[str, Any]:
        """The numbers for a file."""
        tasks: dict[str, dict[str, Any]] = {}
        for (task, length), score in self.scores.items():
            perplexities = _named(self.perplexities_by_task.get((task, length)))
            tasks.setdefault(task, {})[str(length)] = score._asdict() | perplexities
        return {
            "tasks": tasks,
            "average": {str(length): average for length, average in self.averages.items()},
            **{
                name: getattr(self, name)
                for name in ("effective_length", "weighted_inc", "weighted_dec", "questions", "seconds")
            },
            **(_named(self.perplexities) or {"answer_perplexity": None, "other_perplexity": None}),
            "depths": {
                name: {
                    str(length): dict(zip(map(str, matrix.depths), row, strict=True))
                    for length, row in zip(matrix.lengths, matrix.scores.tolist(), strict=True)
                }
                for name, matrix in self.heat_maps.items()
            },
        }


def summarise(results: Sequence[TaskResult]) -> Summary:
    """Numbers of any results, be they complete or not."""
    rows = [_row(result) for result in results]
    averages = length_averages(rows)
    bins = _bins(results)
    asked = any(result.asked_depth is not None for result in results)
    together = [_row(result) for result in results if not asked or result.asked_depth is not None]
    return Summary(
        scores=task_scores(rows),
        averages=averages,
        effective_length=effective_length(averages),
        weighted_inc=weighted_average(averages, increasing=True),
        weighted_dec=weighted_average(averages, increasing=False),
        perplexities=_perplexities(results, lambda _: None).get(None),
        perplexities_by_length=_perplexities(results, lambda result: result.length),
        perplexities_by_task=_perplexities(results, lambda result: (result.task, result.length)),
        heat_maps=_heat_maps(rows, together, bins),
        curves=_curves(together, bins),
        seconds=math.fsum(result.seconds for result in results),
        questions=len(results),
    )


def _row(result: TaskResult) -> Row:
    # Asked depths are the same at all lengths; true ones are what whole sentences allow.
    depth = result.depth if result.asked_depth is None else result.asked_depth
    return Row(result.task, result.length, depth, result.score)


def _bins(results: Sequence[TaskResult]) -> int:
    """As many as evenly spaced depths were asked for."""
    asked = sorted({result.asked_depth for result in results if result.asked_depth is not None})
    return len(asked) if len(asked) > 1 and asked == even_depths(len(asked)) else BINS


def _heat_maps(rows: Sequence[Row], together: Sequence[Row], bins: int) -> dict[str, Matrix]:
    tasks = list(dict.fromkeys(row.task for row in rows if row.depth is not None))
    maps = {task: depth_matrix([row for row in rows if row.task == task], bins=bins) for task in tasks}
    return {"all": depth_matrix(together, bins=bins), **maps} if len(tasks) > 1 else maps


def _curves(rows: Sequence[Row], bins: int) -> dict[int, dict[float, Score]]:
    lengths = sorted({row.length for row in rows if row.depth is not None})
    return {length: position_curve([row for row in rows if row.length == length], bins=bins) for length in lengths}


def _perplexities(results: Sequence[TaskResult], key: Callable[[TaskResult], Key]) -> dict[Key, Perplexities]:
    """Over all tokens of the results that have the same key, each token counting the same."""
    groups: dict[Key, list[TaskResult]] = {}
    for result in results:
        if result.answer_nll is not None:
            groups.setdefault(key(result), []).append(result)
    return {
        name: Perplexities(
            _perplexity([(result.answer_nll, result.answer_tokens) for result in group]),
            _perplexity([(result.other_nll, result.other_tokens) for result in group]),
        )
        for name, group in groups.items()
    }


def _perplexity(sums: Sequence[tuple[float | None, int]]) -> float:
    tokens = sum(count for _, count in sums)
    try:
        return math.exp(math.fsum(nll or 0.0 for nll, _ in sums) / tokens) if tokens else math.nan
    except OverflowError:  # a model that has diverged
        return math.inf


def _named(perplexities: Perplexities | None) -> dict[str, float]:
    if perplexities is None:
        return {}
    return {"answer_perplexity": perplexities.answer, "other_perplexity": perplexities.other}
