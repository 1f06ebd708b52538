"""Haystacks: the long text around an answer, sentence by sentence."""

import random
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS
from lightning_modules.utilities.text_files import read_text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The line that RULER's `noise` haystack repeats (there called `repeat`), first used by Mohtashami and Jaggi (2023)."""

NOISE_SENTENCES: tuple[str, ...] = tuple(f"{sentence}." for sentence in NOISE[:-1].split(". "))

LONGEST_SENTENCE = 1000  # characters; text without periods is cut, or a single unit could exceed the length


class Drawn:
    """Units of text that are drawn on demand and kept, so that the first units are always the same."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw
        self._units: list[str] = []

    def first(self, count: int) -> list[str]:
        """Return the first ``count`` units."""
        while len(self._units) < count:
            self._units.append(self._draw())
        return self._units[:count]


class Essays:
    """Sentences of prose from the ``.txt`` files in a folder, or synthetic sentences without a folder.

    RULER and Needle-in-a-Haystack use Paul Graham's essays, which we may not redistribute: put them, or any other
    prose, into a folder. White space is normalized as in RULER; units are whole sentences, but words in RULER. A text
    that is too short is repeated. Synthetic sentences never contain a digit or a hyphen, and therefore no key or answer
    of a needle.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._source = _synthetic_prose() if folder is None else _prose_of(sorted(Path(folder).glob("*.txt")))
        self._sentences: list[str] = []
        if folder is not None:
            self.sentences(1)  # refuses a folder without prose now, and not in the middle of an evaluation

    def sentences(self, count: int, start: int = 0) -> list[str]:
        """Return ``count`` sentences from index ``start`` on."""
        self._sentences += islice(self._source, max(0, start + count - len(self._sentences)))
        size = len(self._sentences)
        if not size:
            raise ValueError(f"The haystack '{self.folder}' must be a folder with .txt files of prose.")
        return [self._sentences[number % size] for number in range(start, start + count)]


def _synthetic_prose() -> Iterator[str]:
    for part in count():
        rng = random.Random(f"made-up prose {part}")  # another seed would change the questions of earlier results
        yield from [_synthetic_sentence(rng) for _ in range(1000)]


def _prose_of(files: list[Path]) -> Iterator[str]:
    for file in files:
        yield from split_sentences(read_text(str(file), may_be_blank=True))


_SENTENCE_END = re.compile(
    r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])|(?<=[\u201d\u2019])\s+(?=[\u201cA-Z])|(?<=[\u3002\uff01\uff1f])"
)
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Gen|Capt|vs|etc|cf|viz|No|Vol|pp?)|\b[A-Z])\.$")


def split_sentences(text: str) -> list[str]:
    r"""Split a text into sentences with normalized white space; an empty line always ends a sentence.

    Example:
        >>> split_sentences("Mr. Hu met J. Doe. He said: No!\n\nA heading\n\nThe end.")
        ['Mr. Hu met J. Doe.', 'He said: No!', 'A heading', 'The end.']
    """
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        begin = 0
        for end in _SENTENCE_END.finditer(line):
            if _ABBREVIATION.search(line, max(begin, end.start() - 6), end.start()):
                continue
            # Closing quotes and brackets belong to the preceding sentence.
            sentences.append(line[begin : end.end()].rstrip())
            begin = end.end()
        sentences.append(line[begin:].rstrip())
    pieces = []
    for sentence in filter(None, sentences):
        if len(sentence) > LONGEST_SENTENCE:
            pieces += textwrap.wrap(sentence, LONGEST_SENTENCE)
        else:
            pieces.append(sentence)
    return pieces


_SAW = (
    *("followed", "passed", "found", "kept", "painted", "carried", "praised"),
    *("watched", "mended", "forgot", "sold", "described", "drew", "liked"),
)
_WENT = (
    *("rested", "waited", "turned", "slept", "stood", "shone"),
    *("wandered", "lingered", "vanished", "returned", "sang", "grew"),
)
_WHERE = ("near", "behind", "above", "below", "beside", "beyond", "inside", "under")
_WHEN = (
    *("In the morning", "Long ago", "Every autumn", "Before the war"),
    *("After a while", "At noon", "Later that year", "As a rule"),
)
_PATTERNS = (
    "The {a} {n} {w} {p} the {m}.",
    "{t} a {b} {n} {w} {p} the {m}.",
    "Nobody {s} the {a} {n} and the {m}.",
    "{t}, the {n} {s} the {b} {m}.",
    "The {n} of the {m} was {a} and {b}.",
    "We {s} the {n} because the {m} was {b}.",
    "It is said that the {n} {s} the {a} {m} {p} the town.",
    "Some {s} the {m}, others {s} the {b} {n}, and the {a} one {w}.",
)


def _synthetic_sentence(rng: random.Random) -> str:
    return rng.choice(_PATTERNS).format(
        a=rng.choice(ADJECTIVES),
        b=rng.choice(ADJECTIVES),
        n=rng.choice(NOUNS),
        m=rng.choice(NOUNS),
        s=rng.choice(_SAW),
        w=rng.choice(_WENT),
        p=rng.choice(_WHERE),
        t=rng.choice(_WHEN),
    )
