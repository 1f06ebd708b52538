"""Documents of the made-up language, and what is known of each of their words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NamedTuple, cast

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
    Pairs,
    genre_words,
    local_stream,
    possible_values,
)

Kind = Literal["local", "answer", "about", "other"]
"""What a word is: local, the value behind ``recall FIELD``, the genre word behind ``about``, or none of these."""

_MARKERS = (SET, GET, ABOUT)
_SHORTEST_SLOT = 4  # an event of 3 words and a local one


class Word(NamedTuple):
    """A word and what is known of it.

    Attributes:
        text: The word.
        kind: Its kind.
        distance: Of an answer, how many words ago it was last said of its field, or tokens where a word can be several;
            0 for other kinds.
        decisive: Of an answer, how many of its characters must be known: what is behind them could be no other. None
            for all.
    """

    text: str
    kind: Kind = "local"
    distance: int = 0
    decisive: int | None = None


@dataclass(frozen=True)
class RecallRecord:
    """A document and what is known of each of its words.

    Attributes:
        words: The words in order.
    """

    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        """The document, one space between words."""
        return " ".join(word.text for word in self.words)

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Characters ``[start, end)`` of each word in `text`."""
        ends = accumulate(len(word.text) + 1 for word in self.words)
        return [(end - 1 - len(word.text), end - 1) for end, word in zip(ends, self.words, strict=True)]

    def spans(self, kind: Kind, *, farther_than: int = -1) -> list[tuple[int, int]]:
        """Characters ``[start, end)`` of the words of a kind, of which answers were last said so far back.

        Args:
            kind: The kind. Of answers the decisive characters.
            farther_than: The word was last said more than so many words ago.
        """
        return [
            (start, end if word.decisive is None else start + word.decisive)
            for (start, end), word in zip(self.offsets, self.words, strict=True)
            if word.kind == kind and word.distance > farther_than
        ]


def recall_documents(
    count: int,
    *,
    length: int,
    slot: int = 16,
    seed: int = 0,
    second_dialect: float = 0.0,
    second_order: float = 0.0,
    pairs: Pairs = "typed",
) -> Iterator[str]:
    """Documents in which some words can only be known from far back, as plain text.

    A document opens with its genre. Then local words follow one another as a Markov chain: each is one of 24 that may
    follow the one before. About every ``slot`` words an event interrupts the chain:

    - ``let city citla`` (30 %) gives a field its value, at most once in a document;
    - ``recall city citla`` (50 %) repeats the value of a field that has one, all such fields being equally likely
      however far back they were set. Who sees that far knows the value, who does not has 16 to choose from
      (LSD 2.8). These are the key tokens;
    - ``about fablla`` (20 %) is one of the 12 words of the genre. A long context raises its likelihood much
      (LSD 2.8) and yet leaves it low (LCL -2.5): it is why key tokens need a threshold on the LCL too.

    With free pairs any field can have any of 16 values. Then a value is found only by the field before it, which tiny
    models learn late: repeated random words and documents without local words must come first.

    This models one property of text, that a few of its tokens depend on the far past, and nothing else: a value is
    looked up by its field, never inferred, and it is one token. A recipe that works here is shown to work as
    machinery; how much it helps on natural language is not shown.

    A short window begins in the middle of a document, so an evaluator should be trained on rows some of which do,
    for instance on documents twice as long as its rows. One that has seen beginnings only is confidently wrong in short
    windows, and takes local words for key tokens.

    Args:
        count: How many documents.
        length: Words in each document; the tokenizer makes one token of each and puts ``<bos>`` before them.
        slot: Words from one event to the next, on average. Fewer make a dense document, which is quicker to learn from.
        seed: Document ``i`` depends on it, ``i`` and the other arguments only; the language is always the same.
        second_dialect: Share of the documents whose local words follow a second grammar. A model that is trained on
            one dialect predicts the local words of the other badly, whatever it recalls.
        second_order: Share of the local words that depend on the two words before them instead of one: 2,048 states to
            be learned instead of 256.
        pairs: Whether fields have values of their own.

    Yields:
        Documents of exactly ``length`` words, one space apart; the end may cut an event short.

    Raises:
        ValueError: If ``slot`` leaves no room between two events, or a share is not in [0, 1].

    Example:
        >>> next(recall_documents(1, length=12, slot=4, seed=2))
        'satire let king kinma kase about satila danu zafa about satila date'
    """
    for record in recall_records(
        count,
        length=length,
        slot=slot,
        seed=seed,
        second_dialect=second_dialect,
        second_order=second_order,
        pairs=pairs,
    ):
        yield record.text


def recall_records(
    count: int,
    *,
    length: int,
    slot: int = 16,
    seed: int = 0,
    second_dialect: float = 0.0,
    second_order: float = 0.0,
    pairs: Pairs = "typed",
) -> Iterator[RecallRecord]:
    """The same documents as `recall_documents` gives for the same arguments, with what is known of their words."""
    _check(slot, second_dialect, second_order)
    for index in range(count):
        writer = Writer((seed, index), slot, second_dialect, second_order, pairs=pairs)
        yield RecallRecord(tuple(writer.words(length)))


def recall_questions(
    count: int,
    *,
    length: int,
    depth: tuple[float, float] = (0.0, 0.5),
    slot: int = 16,
    seed: int = 0,
    pairs: Pairs = "typed",
) -> Iterator[RecallRecord]:
    """Documents that end in ``recall FIELD`` and the value that was given once, nearer to or farther from the front.

    The field is named nowhere else, so the last word, the only one of kind ``answer`` with this value, is known to who
    remembers that one place. It is the field's value that is asked for: 16 are possible.

    Args:
        count: How many documents.
        length: Words in each, with the question and its answer.
        depth: Where the field was set, drawn evenly: from 0, the front of the document, to 1, its end.
        slot: Words from one event to the next, on average.
        seed: Of the documents; those of `recall_records` with the same seed are others.
        pairs: Whether fields have values of their own; if not, other fields of the document may have the same value.

    Yields:
        Documents of exactly ``length`` words whose last word is the answer. Of other words only the kind is known.

    Raises:
        ValueError: If ``slot`` leaves no room, ``depth`` is no part of [0, 1], or ``length`` is below 8.
    """
    _check(slot, 0.0, 0.0)
    if not 0 <= depth[0] <= depth[1] <= 1:
        raise ValueError(f"`depth` is a part of the document, within [0, 1] in ascending order, got {depth}.")
    if length < 8:
        raise ValueError(f"A question takes 7 words and a genre: `length` must be at least 8, got {length}.")
    for index in range(count):
        yield _question(np.random.default_rng((seed, index, 1)), length, depth, slot, pairs)


def _question(
    rng: np.random.Generator, length: int, depth: tuple[float, float], slot: int, pairs: Pairs
) -> RecallRecord:
    field, value = any_fact(rng, pairs)
    place = min(max(int(rng.uniform(*depth) * length), 1), length - 6)
    writer = Writer(tuple(rng.integers(2**32, size=2).tolist()), slot, without=field, pairs=pairs)
    words = list(chain.from_iterable(writer.parts(length)))
    place = free_place(words, place)
    words[place:place] = [Word(SET, "other"), Word(field, "other"), Word(value, "other")]
    question = [Word(GET, "other"), Word(field, "other"), Word(value, "answer", distance=length - 3 - place)]
    return RecallRecord((*words[: length - 3], *question))


def any_fact(rng: np.random.Generator, pairs: Pairs = "typed") -> tuple[str, str]:
    """A field and one of its values."""
    field = FIELDS[rng.integers(len(FIELDS))]
    return field, possible_values(field, pairs)[rng.integers(VALUES_PER_FIELD)]


def free_place(words: Sequence[Word], place: int) -> int:
    """The last place up to this one that is between two local words or behind an event, where a fact may be set."""
    while words[place].kind != "local" and words[place - 1].kind != "local" and words[place].text not in _MARKERS:
        place -= 1
    return place


def _check(slot: int, second_dialect: float, second_order: float) -> None:
    if slot < _SHORTEST_SLOT:
        raise ValueError(f"An event has up to 3 words: `slot` must be at least {_SHORTEST_SLOT}, got {slot}.")
    for name, share in (("second_dialect", second_dialect), ("second_order", second_order)):
        if not 0 <= share <= 1:
            raise ValueError(f"`{name}` is a share: it must be in [0, 1], got {share}.")


class Writer:
    """Writes one document, event by event.

    Args:
        seed: Of the document.
        slot: Words from one event to the next, on average.
        second_dialect: Share of the documents whose local words are in the second dialect.
        second_order: Share of the local words that depend on the two before them.
        without: A field that the document does not name.
        pairs: Whether fields have values of their own.
    """

    def __init__(
        self,
        seed: tuple[int, ...],
        slot: int,
        second_dialect: float = 0.0,
        second_order: float = 0.0,
        without: str | None = None,
        pairs: Pairs = "typed",
    ) -> None:
        self.rng = np.random.default_rng(seed)
        # Draws of their own: documents of the first dialect and order are what they were before there were others.
        self.style = np.random.default_rng((*seed, 2))
        self.slot, self.second_order = slot, second_order
        self.dialect = cast(Dialect, int(self.style.random() < second_dialect))
        self.without = without
        self.pairs = pairs

    def words(self, length: int) -> list[Word]:
        """The first so many words."""
        words: list[Word] = []
        said: dict[tuple[str, str], int] = {}  # a value behind its field
        for part in self.parts(length):
            for word in part:
                pair = (words[-1].text if words else "", word.text)
                words.append(word._replace(distance=len(words) - said[pair]) if word.kind == "answer" else word)
                said[pair] = len(words) - 1
        return words[:length]

    def local(self, count: int) -> Iterator[str]:
        """So many local words."""
        pairs = iter(lambda: bool(self.style.random() < self.second_order), None) if self.second_order else None
        return local_stream(self.rng, count, dialect=self.dialect, pairs=pairs)

    def parts(self, length: int) -> Iterator[list[Word]]:
        """Events and the local words between them, in turn, until there are so many words or a few more."""
        rng, slot = self.rng, self.slot
        local = self.local(length + 2 * slot)
        genre = GENRES[rng.integers(len(GENRES))]
        values = {
            field: possible_values(field, self.pairs)[rng.integers(VALUES_PER_FIELD)]
            for field in rng.permutation(FIELDS).tolist()
        }
        unset, known = [field for field in values if field != self.without], list[str]()
        yield [Word(genre, "other")]
        written = 1
        while written < length:
            event = self._event(genre, values, unset, known)
            between = int(rng.integers(1, 2 * (slot - len(event))))  # `slot - len(event)` on average
            if event:
                yield event
            yield [Word(next(local)) for _ in range(between)]
            written += len(event) + between

    def _event(self, genre: str, values: dict[str, str], unset: list[str], known: list[str]) -> list[Word]:
        """What happens next, if anything; a field that gets its value moves from `unset` to `known`."""
        kind = self.rng.random()
        if kind < 0.3 and unset:
            known.append(unset.pop())
            return [Word(SET, "other"), Word(known[-1], "other"), Word(values[known[-1]], "other")]
        if 0.3 <= kind < 0.8 and known:
            field = known[self.rng.integers(len(known))]
            return [Word(GET, "other"), Word(field, "other"), Word(values[field], "answer")]
        if kind >= 0.8:
            return [
                Word(ABOUT, "other"),
                Word(genre_words()[genre][self.rng.integers(WORDS_PER_GENRE)], "about"),
            ]
        return []
