"""RULER's question answering: which of many documents answers a question, and what does it say."""

import random
from pathlib import Path

from typing_extensions import override

from lightning_modules.tasks.questions.question_files import Collection, Question, read_hotpot, read_squad
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_TEMPLATE = (
    f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n{_INSTRUCTION}\n\nQuestion: {{question}}"
)
_ANSWER_PREFIX = " Answer:"


class QuestionAnswering(FittedTask):
    """RULER's ``qa_1`` and ``qa_2`` (https://arxiv.org/abs/2404.06654, Section 3.4): real questions among distractors.

    The documents of a question are among those of other questions, in random order; for SQuAD those of the same
    article come first. One of the answers has to occur in the model's answer. The wordings are those of
    https://github.com/NVIDIA/RULER. Unlike there, questions are asked in a random order that depends on the
    seed alone (so that all lengths ask the same ones; the original takes them as they stand in the file, where the
    first dozens are about one article), and the order of documents is drawn for each question.
    """

    max_new_tokens = 32

    def __init__(self, name: str, collection: Collection, source: str) -> None:
        self.name = name
        self.collection = collection
        self.source = source

    @classmethod
    def squad(cls, path: str | Path) -> "QuestionAnswering":
        """Return ``qa_1``: questions of a local file of SQuAD, see `read_squad`."""
        return cls("qa_1", read_squad(path), str(path))

    @classmethod
    def hotpot(cls, path: str | Path) -> "QuestionAnswering":
        """Return ``qa_2``: questions of a local file of HotpotQA, see `read_hotpot`."""
        return cls("qa_2", read_hotpot(path), str(path))

    @override
    def draft(self, asked: Request) -> Draft:
        question = self._question(asked.index, asked.seed)
        documents = [*question.documents, *self._distractors(question, asked.rng, most=asked.length)]
        shuffles = asked.rng.getrandbits(64)

        def order(count: int) -> list[int]:
            chosen = documents[:count]
            random.Random(f"{shuffles} {count}").shuffle(chosen)
            return chosen

        def wording(count: int) -> tuple[str, str]:
            return question_prompt([self.collection.documents[n] for n in order(count)], question.text), _ANSWER_PREFIX

        def depth(count: int) -> float | None:
            one = len(question.documents) == 1 and count > 1
            return order(count).index(question.documents[0]) / (count - 1) if one else None

        return Draft(
            wording,
            question.answers,
            target=f" {question.answers[0]}",
            match="any",
            least=len(question.documents),
            most=len(documents),
            exhausted=f"The {len(documents)} documents of {self.source} are too few: '{self.name}' cannot be"
            f" {asked.length} tokens long. Ask for shorter texts, or take a larger file.",
            depth=depth,
        )

    def _question(self, index: int, seed: int) -> Question:
        questions = self.collection.questions
        order = random.Random(f"{self.name} {seed}").sample(range(len(questions)), len(questions))
        return questions[order[index % len(order)]]

    def _distractors(self, asked: Question, rng: random.Random, most: int) -> list[int]:
        """Return other documents, the related ones first."""
        known = {*asked.documents, *asked.related}
        count = len(self.collection.documents)
        drawn = rng.sample(range(count), min(count, most + len(known)))
        related = rng.sample(asked.related, len(asked.related))
        return [*related, *(number for number in drawn if number not in known)]


def question_prompt(documents: list[str], question: str) -> str:
    """Return numbered documents and a question about them."""
    context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    return _TEMPLATE.format(context=context, question=question)
