"""RULER's question answering: which of many documents answers a question, and what does it say."""

import random
from pathlib import Path

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.question_files import Collection, Question, read_hotpot, read_squad
from lightning_modules.tasks.questions.task import Task

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_TEMPLATE = (
    f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{{context}}\n\n{_INSTRUCTION}\n\nQuestion: {{question}}"
)
_ANSWER_PREFIX = " Answer:"


class QuestionAnswering(Task):
    """RULER's ``qa_1`` and ``qa_2`` (https://arxiv.org/abs/2404.06654, Section 3.4): real questions among distractors.

    The documents of a question stand among those of other questions, in random order; for SQuAD those of the same
    article come first. One of the answers has to occur in what the model says. The wordings are those of
    https://github.com/NVIDIA/RULER. Otherwise than there, questions are asked in a random order that depends on the
    seed alone (so that all lengths ask the same ones; the original takes them as they stand in the file, where the
    first dozens speak of one article), and each question has documents in an order of its own.

    Args:
        name: Name of the task.
        collection: Documents and questions.
        source: What the collection is called in error messages.
    """

    max_new_tokens = 32

    def __init__(self, name: str, collection: Collection, source: str) -> None:
        self.name = name
        self.collection = collection
        self.source = source

    @classmethod
    def squad(cls, path: str | Path) -> "QuestionAnswering":
        """``qa_1``: questions of a local file of SQuAD, see `read_squad`."""
        return cls("qa_1", read_squad(path), str(path))

    @classmethod
    def hotpot(cls, path: str | Path) -> "QuestionAnswering":
        """``qa_2``: questions of a local file of HotpotQA, see `read_hotpot`."""
        return cls("qa_2", read_hotpot(path), str(path))

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        """As `Task.example`; a ``ValueError`` is also raised if all documents together are too few."""
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        asked = self._question(index, seed)
        documents = [*asked.documents, *self._distractors(asked, rng, most=length)]
        shuffles = rng.getrandbits(64)

        def order(count: int) -> list[int]:
            chosen = documents[:count]
            random.Random(f"{shuffles} {count}").shuffle(chosen)
            return chosen

        def wording(count: int) -> tuple[str, str]:
            return question_prompt([self.collection.documents[n] for n in order(count)], asked.text), _ANSWER_PREFIX

        count = self.fit(prompter, length, wording, least=len(asked.documents), most=len(documents))
        prompt = wording(count)[0]
        if count == len(documents):
            raise ValueError(
                f"The {count} documents of {self.source} fill {prompter.count(prompt, _ANSWER_PREFIX)} tokens:"
                f" '{self.name}' cannot be {length} tokens long. Ask for shorter texts, or take a larger file."
            )
        one = len(asked.documents) == 1 and count > 1
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=_ANSWER_PREFIX,
            answers=asked.answers,
            target=f" {asked.answers[0]}",
            max_new_tokens=self.max_new_tokens,
            match="any",
            depth=order(count).index(asked.documents[0]) / (count - 1) if one else None,
        )

    def _question(self, index: int, seed: int) -> Question:
        questions = self.collection.questions
        order = random.Random(f"{self.name} {seed}").sample(range(len(questions)), len(questions))
        return questions[order[index % len(order)]]

    def _distractors(self, asked: Question, rng: random.Random, most: int) -> list[int]:
        """Other documents, the related ones first."""
        known = {*asked.documents, *asked.related}
        count = len(self.collection.documents)
        drawn = rng.sample(range(count), min(count, most + len(known)))
        related = rng.sample(asked.related, len(asked.related))
        return [*related, *(number for number in drawn if number not in known)]


def question_prompt(documents: list[str], question: str) -> str:
    """Numbered documents and a question about them."""
    context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(documents, 1))
    return _TEMPLATE.format(context=context, question=question)
