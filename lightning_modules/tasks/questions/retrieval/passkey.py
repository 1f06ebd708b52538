"""Passkey retrieval: a number in a text that repeats itself."""

from itertools import cycle, islice

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.haystacks import NOISE_SENTENCES
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task, place

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you"
    " about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = " The pass key is"


class Passkey(Task):
    """What is the pass key?

    Of Landmark Attention (Mohtashami and Jaggi 2023, https://arxiv.org/abs/2305.16300), worded as in the public code of
    LongLoRA; *Effective Long-Context Scaling* (Xiong et al. 2023, https://arxiv.org/abs/2309.16039) uses it too. Unlike
    there, the noise on both sides consists of whole sentences, and the first number that the model generates has to be
    the key, whatever its tokens are.
    """

    name = "passkey"
    max_new_tokens = 16
    varies_depth = True

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        key, drawn_depth = str(rng.randint(1, 50000)), rng.random()
        asked_depth = drawn_depth if depth is None else depth

        def wording(count: int) -> tuple[str, str]:
            before = place(asked_depth, count)
            lines = (INSTRUCTION, _noise(before), PASSKEY.format(key=key), _noise(count - before), QUESTION)
            return "\n".join(lines), ANSWER_PREFIX

        count = self.fit(prompter, length, wording)
        prompt, prefix = wording(count)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=(key,),
            target=f" {key}",
            max_new_tokens=self.max_new_tokens,
            match="first_number",
            depth=place(asked_depth, count) / count,
        )


def _noise(count: int) -> str:
    """So many sentences; on both sides of the key the first is the same."""
    return " ".join(islice(cycle(NOISE_SENTENCES), count))
