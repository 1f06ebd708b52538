"""Which questions are put to a model."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lightning_modules.tasks.evaluation.config import Depths
from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task

MOST_UNKNOWN = 0.1
"""Share of tokens that a tokenizer may not know."""


@dataclass(frozen=True)
class Key:
    """Name of a question, which with the seed and the tokenizer decides all of it.

    Attributes:
        task: Name of the task.
        length: Tokens that prompt and answer may have together.
        depth: Depth that was asked for, from 0 (front) to 1 (end); None if it was left to the task.
        index: Number of the question, from 0.
    """

    task: str
    length: int
    depth: float | None
    index: int


class Question(NamedTuple):
    """A question and its name."""

    key: Key
    example: Example


def question_keys(tasks: Sequence[Task], lengths: Sequence[int], samples: int, depths: Depths = None) -> list[Key]:
    """Return the names of all questions, in the order in which they are put.

    There are ``samples`` of each task and length, and of each depth if the place of the task's answer can be chosen.

    Raises:
        ValueError: If something is named twice, or there are depths that make no sense or that no task has.
    """
    for name, values in (("lengths", list(lengths)), ("tasks", [task.name for task in tasks])):
        if len(set(values)) < len(values):
            raise ValueError(f"`{name}` names something twice: {values}. Leave it out once.")
    chosen = _spaced(depths)
    if chosen != [None] and not any(task.varies_depth for task in tasks):
        names = ", ".join(task.name for task in tasks)
        raise ValueError(f"No answer of {names} has a depth that could be chosen: leave `depths` out.")
    return [
        Key(task.name, length, depth, index)
        for task in tasks
        for length in sorted(lengths)
        for depth in (chosen if task.varies_depth else [None])
        for index in range(samples)
    ]


def make_questions(keys: Iterable[Key], tasks: Sequence[Task], prompter: Prompter, seed: int) -> list[Question]:
    """Make questions; a ``ValueError`` reports a length that is too short for a task."""
    by_name = {task.name: task for task in tasks}
    return [
        Question(key, by_name[key.task].example(prompter, key.length, key.index, seed=seed, depth=key.depth))
        for key in keys
    ]


def check_questions(keys: Iterable[Key], tasks: Sequence[Task], prompter: Prompter, seed: int) -> None:
    """Make the first question of each task and length: if it can be made, so can the others.

    It warns if the tokenizer does not know the words of a question, as no model could answer it.
    """
    first = [next(cell) for _, cell in groupby(keys, key=lambda key: (key.task, key.length))]
    for key, example in make_questions(first, tasks, prompter, seed):
        tokens = prompter.encode(example.prompt, example.answer_prefix)
        unknown = tokens.count(prompter.tokenizer.unk_token_id) / len(tokens)
        if unknown > MOST_UNKNOWN:
            warnings.warn(
                f"{unknown:.0%} of the tokens of '{key.task}' are unknown to the tokenizer"
                f" '{prompter.tokenizer.name_or_path}': scores mean little. Take tasks in the model's language.",
                stacklevel=2,
            )


def even_depths(count: int) -> list[float]:
    """Return that many evenly spaced depths from 0 to 1; 2 or more."""
    return [number / (count - 1) for number in range(count)]


def _spaced(depths: Depths) -> list[float | None]:
    if depths is None:
        return [None]
    if isinstance(depths, int):
        if depths < 2:
            raise ValueError(f"`depths` must be 2 or more evenly spaced ones, or a list of them, got {depths}.")
        return [*even_depths(depths)]
    if not depths or len(set(depths)) < len(depths) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"`depths` are from 0 (front) to 1 (end), each once, got {list(depths)}.")
    return [*sorted(depths)]
