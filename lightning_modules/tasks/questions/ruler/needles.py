"""RULER's needles in a haystack: magic numbers hidden in a long text."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import NOISE, Drawn, Essays
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place
from lightning_modules.tasks.questions.words import distinct, key_word, number, uuid

Haystack = Literal["noise", "essay", "needles"]
Kind = Literal["words", "numbers", "uuids"]

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about"
    " the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided"
    " text?"
)
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"

DRAW: dict[Kind, Callable[[random.Random], str]] = {"words": key_word, "numbers": number, "uuids": uuid}
DEPTHS = [round(100 * step / 39) for step in range(40)]  # of needles in essays, in percent


@dataclass(frozen=True)
class Setting:
    """Haystack, kinds of keys and values, and the numbers of keys, of values per key, and of queried keys."""

    haystack: Haystack = "essay"
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


RULER_NEEDLES: dict[str, Setting] = {
    "niah_single_1": Setting(haystack="noise"),
    "niah_single_2": Setting(),
    "niah_single_3": Setting(value="uuids"),
    "niah_multikey_1": Setting(keys=4),
    "niah_multikey_2": Setting(haystack="needles"),
    "niah_multikey_3": Setting(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": Setting(values=4),
    "niah_multiquery": Setting(keys=4, queries=4),
}
"""The tasks `niah` of RULER's `synthetic.yaml`."""


class Needles(FittedTask):
    """Sentences "One of the special magic numbers for brave-otter is: 1234567." in a haystack.

    The tasks `niah` of RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654), with the wording and scoring
    (`string_match_all`) of its public code. Differences: words come from our own lists; keys and values are distinct,
    and no sentence of a `needles` haystack repeats a key or a value of the needles; essays are filled with whole
    sentences (see `Essays`); the number of units is not a multiple of 5, 25 or 500; and there are no extra spaces at
    the ends of essays or between adjacent needles.

    A depth counts units: sentences, or with `noise` RULER's lines of five short sentences. Unless a depth is requested,
    needles are placed as in RULER: in essays at some of 40 evenly spaced depths, else anywhere.
    """

    max_new_tokens = 128

    def __init__(self, name: str, setting: Setting, essays: Essays) -> None:
        self.name = name
        self.setting = setting
        self.essays = essays
        self.varies_depth = setting.queries * setting.values == 1

    @override
    def draft(self, asked: Request) -> Draft:
        rng, setting = asked.rng, self.setting
        keys = distinct(partial(DRAW[setting.key], rng), setting.keys)
        values = distinct(partial(DRAW[setting.value], rng), setting.keys * setting.values)
        values_of = {key: values[i * setting.values : (i + 1) * setting.values] for i, key in enumerate(keys)}
        queries = rng.sample(keys, setting.queries)
        answers = tuple(value for query in queries for value in values_of[query])
        needles = [self.needle(key, value) for key in keys for value in values_of[key]]
        first = self.needle(queries[0], answers[0])
        hidden = _Hidden(rng, needles, first, asked.depth, essays=setting.haystack == "essay")
        sentences, separator = self._make_haystack(rng, {*keys, *values})

        def wording(pieces: int) -> tuple[str, str]:
            return self.worded(separator.join(hidden.among(sentences(pieces))), queries)

        depth = hidden.depth if self.varies_depth else lambda _: None
        return Draft(wording, answers, f" {_join_words(answers)}", depth=depth)

    def needle(self, key: str, value: str) -> str:
        """Return the sentence to be found."""
        return NEEDLE.format(kind=self.setting.value, key=key, value=value)

    def worded(self, context: str, queries: Sequence[str]) -> tuple[str, str]:
        """Return prompt and answer prefix, in the singular if there is a single value."""
        question, prefix, kind = QUESTION, ANSWER_PREFIX, str(self.setting.value)
        if self.varies_depth:
            question = question.replace("Some", "A").replace("are all", "is").replace("are", "is")
            prefix, kind = prefix.replace("are", "is"), kind[:-1]
        query = _join_words(queries)
        return question.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query)

    def _make_haystack(self, rng: random.Random, taken: set[str]) -> tuple[Callable[[int], list[str]], str]:
        """Return a function from a number to that many sentences, and the separator of sentences."""
        if self.setting.haystack == "essay":
            return self.essays.sentences, " "
        if self.setting.haystack == "noise":
            return lambda count: [NOISE] * count, "\n"

        def draw() -> str:
            return self.needle(_draw_other(rng, self.setting.key, taken), _draw_other(rng, self.setting.value, taken))

        return Drawn(draw).first, "\n"


class _Hidden:
    """Needles whose places are drawn before the length of the text is known."""

    def __init__(
        self, rng: random.Random, needles: list[str], asked: str, depth: float | None, *, essays: bool
    ) -> None:
        self.asked = asked
        self.asked_depth = depth
        # If a depth is requested, the other needles are placed first.
        self.others = rng.sample(needles, len(needles)) if depth is None else [n for n in needles if n != asked]
        count = len(self.others)
        depths = [percent / 100 for percent in rng.sample(DEPTHS, count)] if essays else []
        self.depths = sorted(depths or [rng.random() for _ in self.others])

    def among(self, sentences: list[str]) -> list[str]:
        """Insert the needles between the sentences of a text."""
        pieces, last = [], 0
        for needle, depth in zip(self.others, self.depths, strict=True):
            before = int(len(sentences) * depth)
            pieces += [*sentences[last:before], needle]
            last = before
        pieces += sentences[last:]
        if self.asked_depth is not None:
            pieces.insert(place(self.asked_depth, len(pieces)), self.asked)
        return pieces

    def depth(self, sentences: int) -> float:
        """Return the fraction of the other pieces before the needle that is asked for."""
        pieces = self.among([""] * sentences)
        return pieces.index(self.asked) / (len(pieces) - 1)


def _draw_other(rng: random.Random, kind: Kind, taken: Collection[str]) -> str:
    while (drawn := DRAW[kind](rng)) in taken:
        pass
    return drawn


def _join_words(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
