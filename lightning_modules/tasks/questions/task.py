"""What a long-context task is: a pure generator of questions."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from lightning_modules.tasks.questions.budget import most_units
from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import Prompter

Wording = Callable[[int], tuple[str, str]]
"""Prompt and answer prefix for a number of pieces of text."""


def place(depth: float, others: int) -> int:
    """How many of the other pieces of text stand before the one at a depth from 0 (front) to 1 (end).

    Example:
        >>> place(0.0, 10), place(0.25, 10), place(1.0, 10)
        (0, 2, 10)
    """
    return round(depth * others)


class Task(ABC):
    """A kind of question about a long text.

    The same arguments give the same example, on every machine and in any order: nothing is drawn from a global random
    state. Randomness comes from `random.Random` seeded by text.

    Attributes:
        name: As results and options cite it.
        max_new_tokens: Tokens that the model may generate.
        varies_depth: Whether the place of the answer can be asked for.
    """

    name: str
    max_new_tokens: int
    varies_depth: bool = False

    @abstractmethod
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        """One question.

        Args:
            prompter: Counts tokens.
            length: Tokens of prompt, answer prefix and `max_new_tokens` together: they are as many as whole pieces of
                the long text (a sentence, a line, a word) allow, and never more.
            index: Number of the question, from 0.
            seed: Of all that is random.
            depth: Where the answer stands, from 0 to 1; by default drawn, if the task varies it.

        Raises:
            ValueError: If ``length`` is too short for the shortest question, or ``depth`` is given to a task that does
                not vary it.
        """

    def random(self, length: int, index: int, seed: int) -> random.Random:
        """A random generator of this question's own."""
        return random.Random(f"{self.name} {length} {index} {seed}")

    def fit(
        self,
        prompter: Prompter,
        length: int,
        wording: Wording,
        *,
        least: int = 1,
        most: int | None = None,
        guess: int | None = None,
    ) -> int:
        """The most pieces of text with which prompt, answer prefix and answer stay within ``length`` tokens."""
        room = length - self.max_new_tokens
        try:
            return most_units(lambda units: prompter.count(*wording(units)), room, least=least, most=most, guess=guess)
        except ValueError as error:
            raise ValueError(
                f"A length of {length} tokens is too short for '{self.name}', which keeps {self.max_new_tokens} for the"
                f" answer: {error} Ask for longer texts."
            ) from None

    def check_depth(self, depth: float | None) -> None:
        """Raise a ``ValueError`` for a depth that cannot be."""
        if depth is not None and not self.varies_depth:
            raise ValueError(f"The answers of '{self.name}' have no depth that could be chosen: leave `depths` out.")
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"A depth is from 0 (front) to 1 (end), got {depth}.")
