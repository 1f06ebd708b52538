"""RULER's aggregation: find the words of a long list, or of a coded text, that are more frequent than the others."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import zeta
from typing_extensions import override

from lightning_modules.tasks.questions.task import Draft, FittedTask, Request
from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, distinct, synthetic_words

COMMON = 10
SHORT = 4096  # tokens below which words are repeated less
MIN_OTHERS = 10  # with fewer words that are not common, the list would name nearly the common ones alone
WORDS = tuple(sorted({*ADJECTIVES, *NOUNS}))

_COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

ALPHA = 2.0
WORD_LETTERS = 6
MIN_WORDS = 53
"""With at least this many words, the fourth most frequent word, the last of the answer, is ahead of the fifth."""

_FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared"
    " coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the"
    " three most frequently appeared words in the above coded text?"
)
_FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Repeats(NamedTuple):
    """Number of times that a list contains each common word, and each other word."""

    common: int
    others: int


class CommonWords(FittedTask):
    """RULER's ``cwe`` (https://arxiv.org/abs/2404.06654, Section 3.3): 10 words are in a list 30 times, others 3 times.

    An example with its answer precedes the question: 40 other words, 10 of them 10 times and 30 of them 3 times. The
    wordings are those of https://github.com/NVIDIA/RULER. As in RULER, lengths below 4,096 tokens have fewer
    repetitions: 6 and 1, and 3 and 1 in an example of 20 words.

    Unlike in RULER, the words are those of `words` (1,236, enough for about 16,000 tokens), or all synthetic in longer
    lists; the example's words are not in the question's list; the order of each list is drawn separately; and a list
    has at least 10 words that are not common, or the length is refused as too short.
    """

    name = "cwe"
    max_new_tokens = 120

    @override
    def draft(self, asked: Request) -> Draft:
        rng, room = asked.rng, asked.length - self.max_new_tokens
        words = rng.sample(WORDS, len(WORDS))
        lists = _Lists(words, asked.length, rng.getrandbits(64))
        if asked.prompter.count(*lists.wording(len(words) - lists.shown - COMMON)) <= room:  # too few real words
            # No word takes less than a token.
            words = synthetic_words(rng, lists.shown + COMMON + asked.length // lists.repeats.others)
        lists = _Lists(words, asked.length, self.random(asked.length, asked.index, asked.seed).getrandbits(64))
        maximum = len(words) - lists.shown - COMMON
        target = f" {numbered(lists.common)}"
        return Draft(lists.wording, tuple(lists.common), target, min_units=MIN_OTHERS, max_units=maximum)


class _Lists:
    """The two lists of a question, cut from one sequence of words."""

    def __init__(self, words: Sequence[str], length: int, seed: int) -> None:
        self.shown = 20 if length < SHORT else 40
        self.repeats = Repeats(6, 1) if length < SHORT else Repeats(30, 3)
        self.words = words
        self.common = words[self.shown : self.shown + COMMON]
        self.seed = seed
        repeats = Repeats(3, 1) if length < SHORT else Repeats(10, 3)
        example = word_list(words[:COMMON], words[COMMON : self.shown], repeats, random.Random(seed))
        self.example = f"{_COMMON_TEMPLATE.format(context=example)}{_COMMON_PREFIX} {numbered(words[:COMMON])}"

    def wording(self, others: int) -> tuple[str, str]:
        """Return the question with ``others`` words that are not common."""
        first = self.shown + COMMON
        listed = word_list(
            self.common, self.words[first : first + others], self.repeats, random.Random(f"{self.seed} {others}")
        )
        return f"{self.example}\n{_COMMON_TEMPLATE.format(context=listed)}", _COMMON_PREFIX


def word_list(common: Sequence[str], others: Sequence[str], repeats: Repeats, rng: random.Random) -> str:
    """Return all words as often as they repeat, shuffled and numbered."""
    words = [*common] * repeats.common + [*others] * repeats.others
    rng.shuffle(words)
    return numbered(words)


def numbered(words: Sequence[str]) -> str:
    """Number words as RULER does: ``1. one 2. two``."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords(FittedTask):
    """RULER's ``fwe`` (https://arxiv.org/abs/2404.06654, Section 3.3): frequencies fall as in a zeta distribution.

    Among ``n`` words, the word of rank ``k`` occurs ``n k^-2 / zeta(2)`` times, rounded down; the first is the noise
    ``...``, and the next three are the answers. The number of coded words is 1/50 of the length; all have six letters.
    The wordings are those of https://github.com/NVIDIA/RULER. Unlike there, prompt *and* answer stay within the
    length (the original's prompt alone fills it), and the order of each text is drawn separately.
    """

    name = "fwe"
    max_new_tokens = 50

    @override
    def draft(self, asked: Request) -> Draft:
        vocabulary = ["...", *coded_words(asked.rng, max(5, asked.length // 50) - 1)]
        shuffles = asked.rng.getrandbits(64)

        def wording(words: int) -> tuple[str, str]:
            text = coded_text(vocabulary, words, random.Random(f"{shuffles} {words}"))
            return _FREQUENT_TEMPLATE.format(context=text), _FREQUENT_PREFIX

        first, second, third = vocabulary[1:4]
        return Draft(wording, (first, second, third), f" {first}, {second}, and {third}", min_units=MIN_WORDS)


def coded_words(rng: random.Random, count: int) -> list[str]:
    """Return distinct words of random letters."""
    return distinct(lambda: "".join(rng.choices(_LETTERS, k=WORD_LETTERS)), count)


def coded_text(vocabulary: Sequence[str], words: int, rng: random.Random) -> str:
    """Return about ``words`` words, each as often as its rank requires, shuffled."""
    ranks = np.arange(1, len(vocabulary) + 1)
    counts = (words * ranks**-ALPHA / zeta(ALPHA)).astype(int)
    text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return " ".join(text)
