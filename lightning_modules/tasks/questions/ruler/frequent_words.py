"""RULER's frequent words extraction: which coded words of a text are the most frequent ones."""

import random
from collections.abc import Sequence

import numpy as np
from scipy.special import zeta
from typing_extensions import override

from lightning_modules.tasks.questions.task import Draft, FittedTask, Request
from lightning_modules.tasks.questions.words import distinct

ALPHA = 2.0
WORD_LETTERS = 6
LEAST_WORDS = 53
"""From here on the fourth most frequent word, the last that is asked for, is always ahead of the fifth."""

_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared"
    " coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the"
    " three most frequently appeared words in the above coded text?"
)
_ANSWER_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class FrequentWords(FittedTask):
    """RULER's ``fwe`` (https://arxiv.org/abs/2404.06654, Section 3.3): frequencies fall as in a zeta distribution.

    Of ``n`` words the one of rank ``k`` is there ``n k^-2 / zeta(2)`` times, rounded down; the first is the noise
    ``...``, and the next three are asked for. There are as many coded words as 1/50 of the length, all of six letters.
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
            return _TEMPLATE.format(context=text), _ANSWER_PREFIX

        first, second, third = vocabulary[1:4]
        return Draft(wording, (first, second, third), f" {first}, {second}, and {third}", least=LEAST_WORDS)


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
