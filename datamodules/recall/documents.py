"""Generate documents of the synthetic language, with annotated words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from datamodules.recall.language import (
    ABOUT,
    FIELDS,
    GENRES,
    GET,
    SET,
    VALUES_PER_FIELD,
    WORDS_PER_GENRE,
    Dialect,
    field_values,
    genre_words,
    local_stream,
)

Kind = Literal["local", "answer", "about", "other"]
"""Kind of a word: local, the value after ``recall FIELD``, the genre word after ``about``, or another one."""

Inference = Literal["repeat", "paraphrase", "hops", "gist"]
"""Source of an answer: the same words before, other words, another name's value, or the words of a genre."""

_MARKERS = (SET, GET, ABOUT)


class Word(NamedTuple):
    """An annotated word.

    The ``distance`` of an answer is the number of words, or of tokens where a word can have several, since the same
    answer for the same field, or since the latest place it can be inferred from. Its first ``decisive`` characters must
    be recalled, as they determine the rest.
    """

    text: str
    kind: Kind = "local"
    distance: int = 0
    decisive: int | None = None  # None for all characters
    inference: Inference = "repeat"  # of answers


@dataclass(frozen=True)
class RecallRecord:
    """An annotated document."""

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The document, with one space between words."""
        return " ".join(word.text for word in self.words)

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Characters ``[start, end)`` of each word in `text`."""
        offsets = []
        start = 0
        for word in self.words:
            end = start + len(word.text)
            offsets.append((start, end))
            start = end + 1
        return offsets

    def spans(self, kind: Kind, *, farther_than: int = -1, inference: Inference | None = None) -> list[tuple[int, int]]:
        """Find the characters ``[start, end)`` of words of a kind; of answers, only those that are decisive."""
        found = []
        for (start, end), word in zip(self.offsets, self.words, strict=True):
            if word.kind == kind and word.distance > farther_than and inference in (None, word.inference):
                stop = end if word.decisive is None else start + word.decisive
                found.append((start, stop))
        return found


def recall_documents(count: int, **settings: Any) -> Iterator[str]:
    """Yield the texts of `recall_records`, which has the same arguments.

    Example:
        >>> next(recall_documents(1, length=12, slot=4, seed=2))
        'satire let king kinma kase about satila danu zafa about satila date'
    """
    return (record.text for record in recall_records(count, **settings))


def recall_records(
    count: int,
    *,
    length: int,
    slot: int = 16,
    seed: int = 0,
    second_dialect: float = 0.0,
) -> Iterator[RecallRecord]:
    """Generate documents in which some words depend on the far context.

    A document begins with its genre. Then local words form a Markov chain: each is one of 24 successors of the
    preceding word. About every ``slot`` words an event interrupts the chain:

    - ``let city citla`` (30 %) gives a field its value, at most once in a document;
    - ``recall city citla`` (50 %) repeats the value of a field that has one, all such fields being equally likely
      however far back they were set. A model that sees that far knows the value; one that does not has to guess
      among 16 (LSD 2.8). These are the key tokens;
    - ``about fablla`` (20 %) is one of the 12 words of the genre. A long context raises its likelihood a lot
      (LSD 2.8), but it stays low (LCL -2.5): this is why key tokens also need a threshold on the LCL.

    This models a single property of text, that a few tokens depend on the far context: a value is looked up by its
    field, never inferred, and it is one token.

    A short window begins in the middle of a document, so some sequences that an evaluator is trained on should as well:
    for instance, use documents twice as long as its sequences.

    Args:
        count: Number of documents.
        length: Words in each document; the tokenizer makes one token of each and puts ``<bos>`` before them. The last
            event may be cut short.
        slot: Mean number of words between events, 4 or more. Documents with fewer are faster to learn from.
        seed: Document ``i`` depends only on the seed, ``i`` and the other arguments; the language is always the same.
        second_dialect: Fraction of the documents whose local words follow a second grammar, from 0 to 1.
    """
    for index in range(count):
        writer = Writer((seed, index), slot, second_dialect)
        yield RecallRecord(tuple(writer.words(length)))


def recall_questions(
    count: int,
    *,
    length: int,
    depth: tuple[float, float] = (0.0, 0.5),
    slot: int = 16,
    seed: int = 0,
) -> Iterator[RecallRecord]:
    """Generate documents that end in ``recall FIELD`` and a value that occurs once before, at a random depth.

    The field occurs nowhere else, so the last word, the only one of kind ``answer`` with this value, depends on that
    one place. Its depth is drawn from the range ``depth``, where 0 is the front of the document and 1 its end. 16
    values are possible. A document has 8 words or more. The other arguments are those of `recall_records`, whose
    documents differ for the same seed; only answers have distances.
    """
    for index in range(count):
        yield _draw_question(np.random.default_rng((seed, index, 1)), length, depth, slot)


def _draw_question(rng: np.random.Generator, length: int, depth: tuple[float, float], slot: int) -> RecallRecord:
    field, value = any_fact(rng)
    place = min(max(int(rng.uniform(*depth) * length), 1), length - 6)
    writer = Writer(tuple(rng.integers(2**32, size=2).tolist()), slot, without=field)
    words = list(chain.from_iterable(writer.parts(length)))
    place = free_place(words, place)
    words[place:place] = [Word(SET, "other"), Word(field, "other"), Word(value, "other")]
    question = [Word(GET, "other"), Word(field, "other"), Word(value, "answer", distance=length - 3 - place)]
    return RecallRecord((*words[: length - 3], *question))


def any_fact(rng: np.random.Generator) -> tuple[str, str]:
    """Draw a field and one of its values."""
    field = FIELDS[rng.integers(len(FIELDS))]
    return field, field_values()[field][rng.integers(VALUES_PER_FIELD)]


def free_place(words: Sequence[Word], place: int) -> int:
    """Return the last index up to ``place`` where a fact may be inserted: between local words or after an event."""
    while words[place].kind != "local" and words[place - 1].kind != "local" and words[place].text not in _MARKERS:
        place -= 1
    return place


class Writer:
    """Writer of one document, event by event, without the field ``without``."""

    def __init__(
        self, seed: tuple[int, ...], slot: int, second_dialect: float = 0.0, *, without: str | None = None
    ) -> None:
        self.rng = np.random.default_rng(seed)
        # A second generator, so that a document's events do not depend on its dialect.
        self.style = np.random.default_rng((*seed, 2))
        self.slot = slot
        self.dialect = cast(Dialect, int(self.style.random() < second_dialect))
        self.without = without

    def words(self, length: int) -> list[Word]:
        """Return the first ``length`` words."""
        words: list[Word] = []
        said: dict[tuple[str, str], int] = {}  # a value after its field
        before = ""
        for place, word in enumerate(chain.from_iterable(self.parts(length))):
            pair = (before, word.text)
            if word.kind == "answer":
                word = word._replace(distance=place - said[pair])
            words.append(word)
            said[pair] = place
            before = word.text
        return words[:length]

    def local(self, count: int) -> Iterator[str]:
        """Yield ``count`` local words."""
        return local_stream(self.rng, count, dialect=self.dialect)

    def parts(self, length: int) -> Iterator[list[Word]]:
        """Yield events and the local words between them, in turn, for ``length`` words or a few more."""
        rng = self.rng
        slot = self.slot
        local = self.local(length + 2 * slot)
        genre = GENRES[rng.integers(len(GENRES))]
        fields = rng.permutation(FIELDS).tolist()
        values = {field: field_values()[field][rng.integers(VALUES_PER_FIELD)] for field in fields}
        unset = [field for field in values if field != self.without]
        known = list[str]()
        yield [Word(genre, "other")]
        written = 1
        while written < length:
            event = self._draw_event(genre, values, unset, known)
            between = int(rng.integers(1, 2 * (slot - len(event))))  # `slot - len(event)` on average
            if event:
                yield event
            yield [Word(next(local)) for _ in range(between)]
            written += len(event) + between

    def _draw_event(self, genre: str, values: dict[str, str], unset: list[str], known: list[str]) -> list[Word]:
        """Draw the next event, if any; a field that gets its value moves from `unset` to `known`."""
        kind = self.rng.random()
        if kind < 0.3 and unset:
            known.append(unset.pop())
            return [Word(SET, "other"), Word(known[-1], "other"), Word(values[known[-1]], "other")]
        if 0.3 <= kind < 0.8 and known:
            field = known[self.rng.integers(len(known))]
            return [Word(GET, "other"), Word(field, "other"), Word(values[field], "answer")]
        if kind >= 0.8:
            word = genre_words()[genre][self.rng.integers(WORDS_PER_GENRE)]
            return [Word(ABOUT, "other"), Word(word, "about")]
        return []
