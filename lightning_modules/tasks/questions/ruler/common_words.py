"""RULER's common words extraction: which words of a long list come oftener than the others."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task
from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, made_up_words

COMMON = 10
SHORT = 4096
"""Tokens below which words are repeated less."""

LEAST_OTHERS = 10
"""With fewer words that are not common, the list would name nearly the common ones alone."""

WORDS = tuple(sorted({*ADJECTIVES, *NOUNS}))

_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_ANSWER_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


class Repeats(NamedTuple):
    """How often a word is in a list.

    Attributes:
        common: If it is one of the common words.
        others: If it is not.
    """

    common: int
    others: int


class CommonWords(Task):
    """RULER's ``cwe`` (https://arxiv.org/abs/2404.06654, Section 3.3): 10 words are in a list 30 times, others 3 times.

    An example with its answer stands before the question: 40 other words, 10 of them 10 times and 30 of them 3 times.
    The wordings are those of https://github.com/NVIDIA/RULER. As there, lengths below 4,096 tokens repeat less: 6 times
    and once, and 3 times and once in an example of 20 words.

    Otherwise than there, the words are those of `words` (of which there are 1,236, enough for about 16,000 tokens), and
    all are made up in lists that take more; the example's words are not in the question's list; each list is
    in an order of its own; and a list has at least 10 words that are not common, or the length is refused as too short.
    """

    name = "cwe"
    max_new_tokens = 120

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        words = self._words(prompter, length, index, seed)
        lists = _Lists(words, length, self.random(length, index, seed).getrandbits(64))
        most = len(words) - lists.shown - COMMON
        others = self.fit(prompter, length, lists.wording, least=LEAST_OTHERS, most=most)
        prompt, prefix = lists.wording(others)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=tuple(lists.common),
            target=f" {numbered(lists.common)}",
            max_new_tokens=self.max_new_tokens,
        )

    def _words(self, prompter: Prompter, length: int, index: int, seed: int) -> Sequence[str]:
        """Enough words in an order of the question's own: real ones unless there are too few."""
        rng = self.random(length, index, seed)
        words = rng.sample(WORDS, len(WORDS))
        lists = _Lists(words, length, rng.getrandbits(64))
        if prompter.count(*lists.wording(len(words) - lists.shown - COMMON)) > length - self.max_new_tokens:
            return words
        return made_up_words(rng, lists.shown + COMMON + length // lists.repeats.others)  # none takes less than a token


class _Lists:
    """The two lists of a question, cut from one row of words."""

    def __init__(self, words: Sequence[str], length: int, seed: int) -> None:
        self.shown = 20 if length < SHORT else 40
        self.repeats = Repeats(6, 1) if length < SHORT else Repeats(30, 3)
        self.words = words
        self.common = words[self.shown : self.shown + COMMON]
        self.seed = seed
        repeats = Repeats(3, 1) if length < SHORT else Repeats(10, 3)
        example = word_list(words[:COMMON], words[COMMON : self.shown], repeats, random.Random(seed))
        self.example = f"{_TEMPLATE.format(context=example)}{_ANSWER_PREFIX} {numbered(words[:COMMON])}"

    def wording(self, others: int) -> tuple[str, str]:
        """The question with so many words that are not common."""
        first = self.shown + COMMON
        listed = word_list(
            self.common, self.words[first : first + others], self.repeats, random.Random(f"{self.seed} {others}")
        )
        return f"{self.example}\n{_TEMPLATE.format(context=listed)}", _ANSWER_PREFIX


def word_list(common: Sequence[str], others: Sequence[str], repeats: Repeats, rng: random.Random) -> str:
    """All words as often as they shall be, shuffled and numbered."""
    words = [*common] * repeats.common + [*others] * repeats.others
    rng.shuffle(words)
    return numbered(words)


def numbered(words: Sequence[str]) -> str:
    """Words as RULER numbers them: ``1. one 2. two``."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
