"""RULER's question answering: many documents, one of which answers a question."""

import random
from pathlib import Path
from typing import Literal

from typing_extensions import override

from lightning_modules.tasks.questions.question_files import DocumentQuestion, read_hotpot, read_squad
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

    They are read from a local file, ``qa_1`` from one of SQuAD and ``qa_2`` from one of HotpotQA. The documents of a
    question are among those of other questions, in random order; for SQuAD those of the same article come first. One of
    the answers has to occur in the model's answer. The wordings are those of https://github.com/NVIDIA/RULER. Unlike
    there, questions are asked in a random order that depends on the seed alone (the original takes them as in the file,
    where the first dozens are about one article), and the order of documents is drawn for each question.
    """

    max_new_tokens = 32

    def __init__(self, name: Literal["qa_1", "qa_2"], path: str | Path) -> None:
        self.name = name
        self.path = path
        self.collection = read_squad(path) if name == "qa_1" else read_hotpot(path)

    @override
    def draft(self, asked: Request) -> Draft:
        question = self._choose_question(asked.index, asked.seed)
        documents = [*question.documents, *self._draw_distractors(question, asked.rng, maximum=asked.length)]
        shuffles = asked.rng.getrandbits(64)

        def order(count: int) -> list[int]:
            chosen = documents[:count]
            random.Random(f"{shuffles} {count}").shuffle(chosen)
            return chosen

        def wording(count: int) -> tuple[str, str]:
            paragraphs = []
            for number, index in enumerate(order(count), 1):
                paragraphs.append(f"Document {number}:\n{self.collection.documents[index]}")
            return _TEMPLATE.format(context="\n\n".join(paragraphs), question=question.text), _ANSWER_PREFIX

        def depth(count: int) -> float | None:
            if count == 1 or len(question.documents) > 1:
                return None
            return order(count).index(question.documents[0]) / (count - 1)

        return Draft(
            wording,
            question.answers,
            target=f" {question.answers[0]}",
            match="any",
            min_units=len(question.documents),
            max_units=len(documents),
            exhausted=f"The {len(documents)} documents of {self.path} are too few for '{self.name}' with"
            f" {asked.length} tokens. Choose a smaller length or a larger file.",
            depth=depth,
        )

    def _choose_question(self, index: int, seed: int) -> DocumentQuestion:
        questions = self.collection.questions
        order = random.Random(f"{self.name} {seed}").sample(range(len(questions)), len(questions))
        return questions[order[index % len(order)]]

    def _draw_distractors(self, asked: DocumentQuestion, rng: random.Random, maximum: int) -> list[int]:
        """Return other documents, the related ones first."""
        known = {*asked.documents, *asked.related}
        count = len(self.collection.documents)
        drawn = rng.sample(range(count), min(count, maximum + len(known)))
        related = rng.sample(asked.related, len(asked.related))
        return [*related, *(number for number in drawn if number not in known)]
