"""Documents of the synthetic language whose answers have to be inferred: few of them repeat what was said."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from typing_extensions import override

from datamodules.recall.documents import Inference, RecallRecord, Word, Writer
from datamodules.recall.language import (
    ABOUT,
    FIELDS,
    GENRES,
    SAME,
    SET,
    THEME,
    VERBS,
    WORDS_PER_GENRE,
    field_values,
    genre_words,
)

FORMS = 3  # of a value


@cache
def value_forms() -> tuple[tuple[str, ...], ...]:
    """Return the three forms of each of 80 values: values of five fields."""
    tables, each = list(field_values().values()), len(FIELDS) // FORMS
    groups = [
        [word for table in tables[first : first + each] for word in table] for first in range(0, each * FORMS, each)
    ]
    return tuple(zip(*groups, strict=True))


def indirect_records(count: int, *, length: int, slot: int = 16, seed: int = 0) -> Iterator[RecallRecord]:
    """Generate documents like `recall_records`, in which counting which word followed another finds few answers."""
    for index in range(count):
        yield RecallRecord(tuple(IndirectWriter((seed, index), slot).words(length)))


class IndirectWriter(Writer):
    """Writer of one document, event by event.

    - ``let city anibe`` (30 %) gives a name one of 80 values, in the first of its three forms;
    - ``same king city`` (10 %) gives a name the value of another one, which a ``let`` gave it;
    - ``recall king anibe`` (45 %) is an answer, in the first form of the value; ``cite`` and ``quote`` ask for the
      second and the third. A reader knows the value in another form, or as that of another name;
    - ``about fablla`` (15 %) is one of the 12 words of the genre, in the first quarter of the document. Later there is
      ``theme fable`` instead, an answer: the genre is named nowhere else, so it needs the gist of these words.
    """

    bounds = (0.3, 0.4, 0.85)
    """Cumulative shares of ``let``, ``same`` and questions of values; the rest are about the genre."""

    @override
    def words(self, length: int) -> list[Word]:
        words: list[Word] = []
        history = _History()
        for part in self.parts(length):
            if part[-1].kind == "answer":
                part = [*part[:-1], history.annotate(part, len(words))]
            history.read(part, len(words))
            words.extend(part)
        return words[:length]

    @override
    def parts(self, length: int) -> Iterator[list[Word]]:
        rng, slot = self.rng, self.slot
        local = self.local(length + 2 * slot)
        facts = _Facts(GENRES[rng.integers(len(GENRES))], unset=rng.permutation(FIELDS).tolist())
        yield [Word(next(local))]
        written = 1
        while written < length:
            event = self._infer_event(facts, early=written < length / 4)
            between = int(rng.integers(1, 2 * (slot - len(event))))
            if event:
                yield event
            yield [Word(next(local)) for _ in range(between)]
            written += len(event) + between

    def _infer_event(self, facts: "_Facts", *, early: bool) -> list[Word]:
        """Draw the next event, if any, and note it in the facts."""
        rng, values = self.rng, facts.values
        kind, (let, same, ask) = rng.random(), self.bounds
        if kind < let and facts.unset:
            name = facts.unset.pop()
            facts.given.append(name)
            values[name] = int(rng.integers(len(value_forms())))
            return [Word(SET, "other"), Word(name, "other"), Word(value_forms()[values[name]][0], "other")]
        if let <= kind < same and facts.unset and facts.given:
            name, other = facts.unset.pop(), facts.given[rng.integers(len(facts.given))]
            values[name] = values[other]
            return [Word(SAME, "other"), Word(name, "other"), Word(other, "other")]
        if same <= kind < ask and values:
            name, form = [*values][rng.integers(len(values))], int(rng.integers(FORMS))
            return [Word(VERBS[form], "other"), Word(name, "other"), Word(value_forms()[values[name]][form], "answer")]
        if kind >= ask and (early or not facts.hinted):
            facts.hinted = True
            word = genre_words()[facts.genre][rng.integers(WORDS_PER_GENRE)]
            return [Word(ABOUT, "other"), Word(word, "about")]
        return [Word(THEME, "other"), Word(facts.genre, "answer")] if kind >= ask else []


@dataclass
class _Facts:
    """What is true in a document, and what it has said of it."""

    genre: str
    unset: list[str]  # names without a value
    values: dict[str, int] = field(default_factory=dict)  # of names
    given: list[str] = field(default_factory=list)  # names whose value was said outright
    hinted: bool = False  # whether it has used a word of its genre


class _History:
    """What a reader of a document knows so far."""

    def __init__(self) -> None:
        self.mentions: dict[str, int] = {}  # index at which a name's value was last mentioned, in any form
        self.links: defaultdict[str, dict[str, int]] = defaultdict(dict)  # names with the same value, and where
        self.said: set[tuple[str, ...]] = set()

    def read(self, part: list[Word], place: int) -> None:
        """Note what an event at this index says."""
        texts, end = tuple(word.text for word in part), place + len(part) - 1
        if texts[0] == SAME:
            self.links[texts[1]][texts[2]] = self.links[texts[2]][texts[1]] = end
        elif part[0].kind == "other":
            self.mentions[THEME if texts[0] in (ABOUT, THEME) else texts[1]] = end
            self.said.add(texts[-2:])

    def annotate(self, part: list[Word], place: int) -> Word:
        """Return the answer with its distance from the place it can be inferred from, and how."""
        texts = tuple(word.text for word in part)
        name = THEME if texts[0] == THEME else texts[1]
        how: Inference = "gist" if name == THEME else "paraphrase" if name in self.mentions else "hops"
        distance = place + len(part) - 1 - self._last(name, place, frozenset())
        return part[-1]._replace(distance=distance, inference="repeat" if texts[-2:] in self.said else how)

    def _last(self, name: str, through: int, visited: frozenset[str]) -> int:
        """Return the index from which on the text alone no longer determines the value of a name."""
        others = [(other, index) for other, index in self.links[name].items() if other not in visited]
        linked = [self._last(other, min(through, index), visited | {name}) for other, index in others]
        return max([min(through, self.mentions.get(name, -1)), *linked])
