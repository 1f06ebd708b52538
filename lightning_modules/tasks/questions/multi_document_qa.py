"""Question answering over many documents, one of which has the answer, over that one, and over none."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from typing_extensions import override

from lightning_modules.tasks.questions.example import contains_answer
from lightning_modules.tasks.questions.question_files import OpenQuestion, Passage, read_nq_open
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place
from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, synthetic_words

Query = Literal["before", "after", "both"]
"""Where the question is."""

Reference = Literal["oracle", "closed_book"]
"""Only the passage that answers the question, or no passage."""

_INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be"
    " irrelevant)."
)
_TRADES = (
    *("baker", "carpenter", "clockmaker", "cooper", "engraver", "gardener", "glassblower", "joiner", "mason"),
    *("miller", "painter", "potter", "printer", "saddler", "sculptor", "shipwright", "tailor", "weaver"),
)
_QUESTIONS = ("in which town was {name} born", "what was the name of {name}'s ship", "who taught {name}")
"""Questions about the facts of a life, in their order."""


class MultiDocumentQA(FittedTask):
    """One passage answers the question (Liu et al., 2023, https://arxiv.org/abs/2307.03172, Section 2).

    Prompt, placement of the passage and scoring follow https://github.com/nelson-liu/lost-in-the-middle: the first line
    of the answer must contain one of the wordings, normalized. The passages retrieved for the question come in the
    order of the file, the most relevant first. Differences: a length that needs more passages also uses passages of
    other questions without the answer, and then all are shuffled; questions come in a random order that depends only on
    the seed; and ``query: before`` is our addition.

    Without a file (see `read_nq_open`), questions and documents are synthetic: short biographies of invented people.
    Scores on them are not comparable to *Lost in the Middle*. The question is ``after`` the passages, ``before`` them,
    or in ``both`` places (the paper's query-aware contextualization). The paper has 10, 20 or 30 ``documents``; by
    default the length decides.
    """

    max_new_tokens = 100
    varies_depth = True

    def __init__(self, path: str | Path | None = None, documents: int | None = None, query: Query = "after") -> None:
        if documents is not None and documents < 1:
            raise ValueError(f"`documents` must be 1 or more, because one passage has the answer; got {documents}.")
        self.query = query
        self.name = "multi_document_qa" if query == "after" else f"multi_document_qa_query_{query}"
        self.documents = documents
        self.path = path
        self.questions = () if path is None else read_nq_open(path)
        self._passages = sum(1 + len(question.distractors) for question in self.questions)

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        question = choose_question(self.questions, asked.index, asked.seed)
        depth = rng.random() if asked.depth is None else asked.depth
        shelf = _Shelf(question, self._other_passages(rng), rng.getrandbits(64))
        wanted = f"{self.documents} passages"
        if self.documents is None:
            wanted = f"{asked.length} tokens of passages"
        too_few = (
            f"{self.path} has too few passages without the answer to '{question.text}': '{self.name}' cannot have"
            f" {wanted}. Reduce them, or use a larger file."
        )
        if self.documents is not None and not shelf.holds(self.documents):
            raise ValueError(too_few)
        return Draft(
            lambda count: (search_prompt(shelf.passages(count, depth), question.text, self.query), ""),
            question.answers,
            target=f" {question.answers[0]}",
            match="subspan",
            min_units=self.documents or 2,
            max_units=self.documents or self._passages or None,
            exhausted=too_few if self.documents is None else None,
            depth=lambda count: place(depth, count - 1) / max(1, count - 1),
        )

    def _other_passages(self, rng: random.Random) -> Iterator[Passage]:
        if not self.questions:
            return synthetic_lives(rng)
        others = rng.sample(self.questions, len(self.questions))
        return itertools.chain.from_iterable((question.gold, *question.distractors) for question in others)


class ReferenceQA(FittedTask):
    """The questions of `MultiDocumentQA` without the search: with the ``oracle`` passage alone, or ``closed_book``.

    These are the paper's bounds: a model that finds the passage answers as with the oracle, and one that ignores it as
    from memory. The prompts are those of the original. They do not depend on the length, which they do not fill.
    """

    max_new_tokens = 100

    def __init__(self, setting: Reference, path: str | Path | None = None) -> None:
        self.name = f"multi_document_qa_{setting}"
        self.setting = setting
        self.questions = () if path is None else read_nq_open(path)

    @override
    def draft(self, asked: Request) -> Draft:
        question = choose_question(self.questions, asked.index, asked.seed)
        if self.setting == "oracle":
            prompt = search_prompt([question.gold], question.text, "after")
        else:
            prompt = f"Question: {question.text}\nAnswer:"
        target = f" {question.answers[0]}"
        return Draft(lambda _: (prompt, ""), question.answers, target, match="subspan", max_units=1)


def choose_question(questions: Sequence[OpenQuestion], index: int, seed: int) -> OpenQuestion:
    """Return a question of the file, or a synthetic one without a file; all settings ask the same questions."""
    if not questions:
        return synthetic_question(random.Random(f"multi_document_qa {seed} {index}"))
    order = random.Random(f"multi_document_qa {seed}").sample(range(len(questions)), len(questions))
    return questions[order[index % len(order)]]


class _Shelf:
    """Passages of a question: its own distractors first, then passages of other questions as needed."""

    def __init__(self, asked: OpenQuestion, others: Iterator[Passage], seed: int) -> None:
        self.asked = asked
        self.seed = seed
        self._distractors = list(asked.distractors)
        seen = {asked.gold, *asked.distractors}
        self._other_passages = (
            other for other in others if other not in seen and not contains_answer(" ".join(other), asked.answers)
        )

    def holds(self, count: int) -> bool:
        """Return whether there are ``count`` passages, including the gold passage."""
        self._distractors += itertools.islice(self._other_passages, max(0, count - 1 - len(self._distractors)))
        return len(self._distractors) >= count - 1

    def passages(self, count: int, depth: float) -> list[Passage]:
        """Return ``count`` passages, or all available ones, with the gold passage at its depth."""
        self.holds(count)
        chosen = self._distractors[: count - 1]
        if len(chosen) > len(self.asked.distractors):
            random.Random(f"{self.seed} {count}").shuffle(chosen)
        chosen.insert(place(depth, count - 1), self.asked.gold)
        return chosen


def search_prompt(passages: Sequence[Passage], question: str, query: Query) -> str:
    """Return passages as search results, and the question about them."""
    prompt = f"{_INSTRUCTION}\n\n"
    if query != "after":
        prompt += f"Question: {question}\n\n"
    for number, (title, text) in enumerate(passages, 1):
        prompt += f"Document [{number}](Title: {title}) {text}\n"
    prompt += "\n"
    if query != "before":
        prompt += f"Question: {question}\n"
    return f"{prompt}Answer:"


def synthetic_question(rng: random.Random) -> OpenQuestion:
    """Return a question about one biography; its distractors come from `synthetic_lives`."""
    words = synthetic_words(rng, 5)
    gold, facts = _write_life(words, rng)
    asked = rng.randrange(len(_QUESTIONS))
    return OpenQuestion(_QUESTIONS[asked].format(name=gold.title), (facts[asked],), gold, ())


def synthetic_lives(rng: random.Random) -> Iterator[Passage]:
    """Yield endless biographies with distinct names."""
    used: set[str] = set()
    while True:
        fresh = [word for word in synthetic_words(rng, 500) if word not in used]
        used.update(fresh)
        for start in range(0, len(fresh) - 4, 5):
            yield _write_life(fresh[start : start + 5], rng)[0]


def _write_life(words: list[str], rng: random.Random) -> tuple[Passage, tuple[str, str, str]]:
    """Write a biography of about 70 words, and return it with its answers: the town, the ship and the teacher."""
    first, last, town, ship, teacher = map(str.capitalize, words)
    born = rng.randint(1500, 1850)
    trade = rng.choice(_TRADES)
    text = (
        f"{first} {last} ({born}-{born + rng.randint(40, 85)}) was a {trade}, born in the town of {town} as the"
        f" {rng.choice(('first', 'second', 'third', 'fourth', 'fifth'))} child of a {rng.choice(_TRADES)}. {first} was"
        f" taught by {teacher}, sailed the northern coast for {rng.randint(3, 30)} years on the {ship}, a ship with"
        f" {_draw_thing(rng)} at its bow, and opened a workshop in {born + rng.randint(20, 38)}. What is left of"
        f" {first}'s work is {_draw_thing(rng)}, {_draw_thing(rng)} and a letter about {_draw_thing(rng)}."
    )
    return Passage(f"{first} {last}", text), (town, ship, teacher)


def _draw_thing(rng: random.Random) -> str:
    adjective = rng.choice(ADJECTIVES)
    article = "an" if adjective[0] in "aeiou" else "a"
    return f"{article} {adjective} {rng.choice(NOUNS)}"
