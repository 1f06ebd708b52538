"""*Lost in the Middle*'s question answering over many documents, one of which has the answer."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example, contains_answer
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.question_files import OpenQuestion, Passage, read_nq_open
from lightning_modules.tasks.questions.retrieval.key_values import Query
from lightning_modules.tasks.questions.synthetic_lives import made_up_lives, made_up_question
from lightning_modules.tasks.questions.task import Task, Wording, place

_INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be"
    " irrelevant)."
)


class MultiDocumentQA(Task):
    """One passage answers the question (Liu et al., 2023, https://arxiv.org/abs/2307.03172, Section 2).

    Prompt, moving of the passage and scoring are those of https://github.com/nelson-liu/lost-in-the-middle: the first
    line of the answer has to hold one of the wordings, normalised. The passages found for the question come as in the
    file, the most fitting first. Otherwise than there, a length that needs more than those takes passages of other
    questions, too, that do not hold the answer, and then all are shuffled; questions are asked in a random order that
    depends on the seed alone; and ``query: before`` is a variant of ours.

    Args:
        path: A local file of questions, see `read_nq_open`. By default the questions are made up, as their documents:
            short lives of people who never were (`made_up_lives`). Scores on them are no scores of *Lost in the
            Middle*.
        query: Where the question stands: after the passages, or as in the paper's query-aware contextualisation in
            ``both`` places, or only before them.
        documents: Passages, as 10, 20 or 30 in the paper; by default as many as the length allows.

    Raises:
        ValueError: If the file cannot be used, the query is none of these, or there are fewer than 2 documents.
    """

    max_new_tokens = 100
    varies_depth = True

    def __init__(self, path: str | Path | None = None, *, query: Query = "after", documents: int | None = None) -> None:
        if documents is not None and documents < 2:
            raise ValueError(
                f"`documents` counts the passages, of which one has the answer: 2 or more, not {documents}."
            )
        if query not in get_args(Query):
            raise ValueError(f"`query` is where the question stands: before, after or both, got '{query}'.")
        self.query = query
        self.name = "multi_document_qa" if query == "after" else f"multi_document_qa_query_{query}"
        self.documents = documents
        self.path = path
        self.questions = () if path is None else read_nq_open(path)
        self._passages = sum(1 + len(question.distractors) for question in self.questions)

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        """As `Task.example`; a ``ValueError`` is also raised if there are too few passages."""
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        asked = self._question(index, seed)
        depth = rng.random() if depth is None else depth
        shelf = _Shelf(asked, self._others(rng), rng.getrandbits(64))

        def wording(count: int) -> tuple[str, str]:
            return search_prompt(shelf.passages(count, depth), asked.text, self.query), ""

        count = self._count(prompter, length, wording, shelf)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=wording(count)[0],
            answer_prefix="",
            answers=asked.answers,
            target=f" {asked.answers[0]}",
            max_new_tokens=self.max_new_tokens,
            match="subspan",
            depth=place(depth, count - 1) / (count - 1),
        )

    def _question(self, index: int, seed: int) -> OpenQuestion:
        if not self.questions:
            return made_up_question(random.Random(f"multi_document_qa {seed} {index}"))
        order = random.Random(f"multi_document_qa {seed}").sample(range(len(self.questions)), len(self.questions))
        return self.questions[order[index % len(order)]]

    def _others(self, rng: random.Random) -> Iterator[Passage]:
        """Passages of other questions."""
        if not self.questions:
            return made_up_lives(rng)
        others = rng.sample(self.questions, len(self.questions))
        return (passage for question in others for passage in (question.gold, *question.distractors))

    def _count(self, prompter: Prompter, length: int, wording: Wording, shelf: "_Shelf") -> int:
        """How many passages there shall be."""
        if self.documents is not None:
            count = self.fit(prompter, length, wording, least=self.documents, most=self.documents)
            enough = shelf.holds(count)
        else:
            most = self._passages or None
            count = self.fit(prompter, length, wording, least=2, most=most)
            enough = count != most
        if not enough:
            wanted = f"{length} tokens of passages" if self.documents is None else f"{self.documents} passages"
            raise ValueError(
                f"{self.path} holds too few passages that do not answer '{shelf.asked.text}': '{self.name}' cannot have"
                f" {wanted}. Ask for fewer, or take a larger file."
            )
        return count


class _Shelf:
    """The passages of a question: what was found for it, and then of the others as many as are called for."""

    def __init__(self, asked: OpenQuestion, others: Iterator[Passage], seed: int) -> None:
        self.asked = asked
        self.seed = seed
        self._distractors = list(asked.distractors)
        seen = {asked.gold, *asked.distractors}
        self._others = (
            other for other in others if other not in seen and not contains_answer(" ".join(other), asked.answers)
        )

    def holds(self, count: int) -> bool:
        """Whether there are so many, the gold one with them."""
        self._distractors += itertools.islice(self._others, max(0, count - 1 - len(self._distractors)))
        return len(self._distractors) >= count - 1

    def passages(self, count: int, depth: float) -> list[Passage]:
        """So many, or all that there are, with the gold one at its place."""
        self.holds(count)
        chosen = self._distractors[: count - 1]
        if len(chosen) > len(self.asked.distractors):
            random.Random(f"{self.seed} {count}").shuffle(chosen)
        chosen.insert(place(depth, count - 1), self.asked.gold)
        return chosen


def search_prompt(passages: Sequence[Passage], question: str, query: Query) -> str:
    """Passages as search results, and the question about them."""
    results = "\n".join(
        f"Document [{number}](Title: {title}) {text}" for number, (title, text) in enumerate(passages, 1)
    )
    before = "" if query == "after" else f"Question: {question}\n\n"
    after = "" if query == "before" else f"Question: {question}\n"
    return f"{_INSTRUCTION}\n\n{before}{results}\n\n{after}Answer:"
