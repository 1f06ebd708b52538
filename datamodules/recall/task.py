"""Long-context task in the synthetic language, for models that know only this language."""

from typing_extensions import override

from datamodules.recall.documents import RecallRecord, recall_questions
from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task

_LAST_WORDS = 6  # words from the last possible place of the fact on: the fact, and the question with its answer
_MIN_WORDS = 8


class RecallTask(Task):
    """Task whose documents mention a value once and end in ``recall city``; see `recall_questions`.

    The answer is one of the 16 values of a field: a model that knows the language but cannot look back has a score of
    6 %.
    """

    name = "recall"
    max_new_tokens = 1
    varies_depth = True

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        rng = self.random(length, index, seed)
        own_seed = rng.getrandbits(32)
        drawn_depth = rng.random()
        place = drawn_depth if depth is None else depth

        def record(words: int) -> RecallRecord:
            return next(recall_questions(1, length=words, depth=(place, place), seed=own_seed))

        def wording(words: int) -> tuple[str, str]:
            return record(words).text.rpartition(" ")[0], ""

        words = self.fit(prompter, length, wording, minimum=_MIN_WORDS)
        *_, answer = record(words).words
        position = words - 3 - answer.distance
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=wording(words)[0],
            answer_prefix="",
            answers=(answer.text,),
            target=f" {answer.text}",
            max_new_tokens=self.max_new_tokens,
            match="first_word",
            depth=(position - 1) / max(1, words - _LAST_WORDS - 1),
        )
