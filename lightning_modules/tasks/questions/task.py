"""A long-context task: a pure generator of questions whose text fills a number of tokens."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example, Match
from lightning_modules.tasks.questions.prompter import Prompter

Wording = Callable[[int], tuple[str, str]]
"""Prompt and answer prefix for a number of pieces of text."""

SPARE = 1000  # pieces beyond one per token after which a text that hardly grows is given up


def place(depth: float, others: int) -> int:
    """Return how many of the other pieces precede the one at a depth from 0 (front) to 1 (end)."""
    return round(depth * others)


class Task(ABC):
    """A kind of question about a long text; the same arguments give the same example, on every machine.

    ``max_new_tokens`` limits the answer; ``varies_depth`` is whether its place in the text can be chosen.
    """

    name: str
    max_new_tokens: int
    varies_depth: bool = False

    @abstractmethod
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        """Make one question; a ``ValueError`` is raised if ``length`` is too short for the shortest one.

        ``length`` counts the tokens of prompt, answer prefix and `max_new_tokens`: as many as whole pieces of the long
        text (a sentence, a line, a word) allow, and never more. ``depth`` is the place of the answer, from 0 to 1, if
        the task varies it; drawn by default.
        """

    def random(self, length: int, index: int, seed: int) -> random.Random:
        """Return a random generator for this question alone."""
        return random.Random(f"{self.name} {length} {index} {seed}")

    def fit(
        self,
        prompter: Prompter,
        length: int,
        wording: Wording,
        *,
        minimum: int = 1,
        maximum: int | None = None,
        guess: int | None = None,
    ) -> int:
        """Return the most pieces of text with which prompt, answer prefix and answer stay within ``length`` tokens."""
        room = length - self.max_new_tokens
        try:
            return most_units(
                lambda units: prompter.count(*wording(units)), room, minimum=minimum, maximum=maximum, guess=guess
            )
        except ValueError as error:
            raise ValueError(
                f"A length of {length} tokens is too short for '{self.name}', which keeps {self.max_new_tokens} for the"
                f" answer: {error} Ask for longer texts."
            ) from None


@dataclass(frozen=True)
class Request:
    """The arguments of `Task.example`, with the question's random generator."""

    prompter: Prompter
    length: int
    index: int
    seed: int
    depth: float | None
    rng: random.Random

    def drawn_depth(self) -> float:
        """Return the depth that is asked for, or a random one."""
        drawn = self.rng.random()  # in any case, so that what is drawn later does not depend on the depth
        return drawn if self.depth is None else self.depth


class Draft(NamedTuple):
    """A question before its length is known."""

    wording: Wording  # prompt and answer prefix for a number of pieces
    answers: tuple[str, ...]  # as in `Example`, like target and match
    target: str
    match: Match = "all"
    minimum: int = 1  # fewest pieces
    maximum: int | None = None  # number of all pieces; None without a limit
    exhausted: str | None = None  # error if all pieces together leave room for more; None if that is fine
    depth: Callable[[int], float | None] = lambda _: None  # depth of the answer among a number of pieces


class FittedTask(Task):
    """A task that fills a draft with all pieces of text that fit."""

    @abstractmethod
    def draft(self, asked: Request) -> Draft:
        """Draw a question."""

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        draft = self.draft(Request(prompter, length, index, seed, depth, self.random(length, index, seed)))
        count = self.fit(prompter, length, draft.wording, minimum=draft.minimum, maximum=draft.maximum)
        if draft.exhausted is not None and count == draft.maximum:
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


def most_units(
    tokens: Callable[[int], int], limit: int, *, minimum: int = 1, maximum: int | None = None, guess: int | None = None
) -> int:
    """Return the largest number of pieces, from ``minimum`` to ``maximum``, whose text has at most ``limit`` tokens.

    As tokens grow about linearly with the pieces, interpolation finds the number in a few tries, each of which
    tokenizes the whole text. A ``guess`` of the result may save some. A ``ValueError`` is raised if not even
    ``minimum`` pieces fit, or if the text hardly grows with its pieces.
    """
    low, low_tokens = minimum, tokens(minimum)
    if low_tokens > limit:
        raise ValueError(f"The shortest question takes {low_tokens} tokens, more than {limit}.")
    high, high_tokens = 0, 0  # the fewest pieces known to be too many, once there are any
    step = max(1, guess - low if guess is not None else low)
    while high == 0:
        if low == maximum:
            return low
        tried = low + step if maximum is None else min(low + step, maximum)
        count = tokens(tried)
        if count > limit:
            high, high_tokens = tried, count
        else:
            rate = (count - low_tokens) / (tried - low)
            low, low_tokens = tried, count
            if low - minimum > limit + SPARE:
                raise ValueError(
                    f"{low:,} pieces of text are only {count:,} tokens: the tokenizer does not tell them apart."
                )
            step = max(1, 2 * step if rate <= 0 else min(100 * step, int((limit - count) / rate) + 1))
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (limit - low_tokens) / (high_tokens - low_tokens)
        tried = min(high - 1, max(low + 1, low + round(share * (high - low))))
        count = tokens(tried)
        halve = not halve  # interpolation alone may creep towards one end
        if count > limit:
            high, high_tokens = tried, count
        else:
            low, low_tokens = tried, count
    return low
