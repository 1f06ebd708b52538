"""Base classes of long-context tasks: pure generators of questions whose text fills a number of tokens.

A long text consists of units (sentences, lines, words), and a question has the most units that fit into its length.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from typing_extensions import override

from lightning_modules.tasks.questions.example import Example, Match
from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.prompter import Prompter

Wording = Callable[[int], tuple[str, str]]
"""Prompt and answer prefix for a number of units of text."""

_FILE = Path(__file__).with_name("tasks.yaml")

SETTINGS: dict[str, dict[str, Any]] = {
    name: setting
    for name, setting in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()
    if not name.startswith(".")
}
"""Settings of each task; names that begin with a period are shared settings."""

SPARE_UNITS = 1000  # units beyond one per token after which a text that hardly grows is an error


def place(depth: float, others: int) -> int:
    """Return how many of the other units precede the unit at a depth from 0 (front) to 1 (end)."""
    return round(depth * others)


class Task(ABC):
    """Kind of question about a long text. Equal arguments give equal examples on every machine.

    ``max_new_tokens`` limits the answer; ``varies_depth`` is whether the depth of the answer can be chosen.
    """

    name: str
    max_new_tokens: int
    varies_depth: bool = False

    @abstractmethod
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        """Generate one question.

        Args:
            prompter: Counts tokens.
            length: Maximum tokens of prompt, answer prefix and `max_new_tokens`, filled with whole units.
            index: Number of the question.
            seed: Random seed.
            depth: Depth of the answer, from 0 to 1, if the task varies it; random by default.

        Raises:
            ValueError: If ``length`` is too short for the shortest question.
        """

    def random(self, length: int, index: int, seed: int) -> random.Random:
        """Return a random generator for this question."""
        return random.Random(f"{self.name} {length} {index} {seed}")

    def fit(
        self, prompter: Prompter, length: int, wording: Wording, *, minimum: int = 1, maximum: int | None = None
    ) -> int:
        """Return the largest number of units with which prompt, answer prefix and answer have ``length`` tokens."""
        room = length - self.max_new_tokens
        try:
            return most_units(lambda units: prompter.count(*wording(units)), room, minimum=minimum, maximum=maximum)
        except ValueError as error:
            raise ValueError(
                f"A length of {length} tokens is too short for '{self.name}', which reserves {self.max_new_tokens} for"
                f" the answer: {error} Choose a larger length."
            ) from None


@dataclass(frozen=True)
class Request:
    """Arguments of `Task.example`, with the question's random generator."""

    prompter: Prompter
    length: int
    index: int
    seed: int
    depth: float | None
    rng: random.Random

    def drawn_depth(self) -> float:
        """Return the requested depth, or a random one."""
        drawn = self.rng.random()  # drawn in any case, so that later draws do not depend on the request
        return drawn if self.depth is None else self.depth


class Draft(NamedTuple):
    """Question before its number of units is known."""

    wording: Wording  # prompt and answer prefix for a number of units
    answers: tuple[str, ...]  # as in `Example`, like target and match
    target: str
    match: Match = "all"
    min_units: int = 1
    max_units: int | None = None  # number of available units; None without a limit
    exhausted: str | None = None  # error if all units do not fill the length; None if that is acceptable
    depth: Callable[[int], float | None] = lambda _: None  # depth of the answer for a number of units


class FittedTask(Task):
    """Task that fills a draft with the largest number of text units that fits."""

    @abstractmethod
    def draft(self, asked: Request) -> Draft:
        """Draw a question without fixing its number of units."""

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        draft = self.draft(Request(prompter, length, index, seed, depth, self.random(length, index, seed)))
        count = self.fit(prompter, length, draft.wording, minimum=draft.min_units, maximum=draft.max_units)
        if draft.exhausted is not None and count == draft.max_units:
            raise ValueError(draft.exhausted)
        prompt, prefix = draft.wording(count)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=draft.answers,
            target=draft.target,
            max_new_tokens=self.max_new_tokens,
            match=draft.match,
            depth=draft.depth(count),
        )


class WordedTask(FittedTask):
    """A task of `tasks.yaml`, whose comments name its origin and the differences from the original.

    ``setting`` has its wordings and numbers, and ``kinds`` has the function that draws a question, for each ``kind`` of
    task. Questions depend on the order of its random draws, so a change of the order changes all results.
    """

    def __init__(self, name: str, setting: Mapping[str, Any], essays: Essays, kinds: Mapping[str, "Kind"]) -> None:
        self.name = name
        self.setting = setting
        self.essays = essays
        self.max_new_tokens = self.setting["max_new_tokens"]
        self.varies_depth = self.setting["varies_depth"]
        self._draw = kinds[self.setting["kind"]]

    @override
    def draft(self, asked: Request) -> Draft:
        return self._draw(self, asked, self.setting)


Kind = Callable[[WordedTask, Request, Mapping[str, Any]], Draft]
"""Draws a question, given its task and settings."""


def most_units(tokens: Callable[[int], int], limit: int, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return the largest number of units, from ``minimum`` to ``maximum``, whose text has at most ``limit`` tokens.

    Tokens grow about linearly with units, so interpolation needs only a few trials, each of which tokenizes the whole
    text. Raises a ``ValueError`` if ``minimum`` units do not fit, or if the text hardly grows with its units.
    """
    # 1. `low` units always fit.
    low = minimum
    low_tokens = tokens(minimum)
    if low_tokens > limit:
        raise ValueError(f"The shortest question has {low_tokens} tokens, more than {limit}.")
    # 2. Extrapolate from `low` until some number `high` does not fit.
    high = 0
    high_tokens = 0
    step = max(1, low)
    while high == 0:
        if low == maximum:
            return low
        tried = low + step if maximum is None else min(low + step, maximum)
        count = tokens(tried)
        if count > limit:
            high = tried
            high_tokens = count
        else:
            rate = (count - low_tokens) / (tried - low)
            low = tried
            low_tokens = count
            if low - minimum > limit + SPARE_UNITS:
                raise ValueError(
                    f"{low:,} units of text have only {count:,} tokens: the tokenizer does not distinguish them."
                )
            step = 2 * step if rate <= 0 else min(100 * step, int((limit - count) / rate) + 1)
    # 3. Interpolate between `low` and `high`; bisect every other time, because interpolation alone may converge slowly.
    halve = False
    while high - low > 1:
        fraction = 0.5 if halve else (limit - low_tokens) / (high_tokens - low_tokens)
        tried = min(high - 1, max(low + 1, low + round(fraction * (high - low))))
        count = tokens(tried)
        halve = not halve
        if count > limit:
            high = tried
            high_tokens = count
        else:
            low = tried
            low_tokens = count
    return low
