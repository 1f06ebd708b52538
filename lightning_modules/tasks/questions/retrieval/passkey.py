"""Passkey retrieval: a number in a text that repeats itself."""

from itertools import cycle, islice

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import NOISE_SENTENCES
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place

INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you"
    " about the important information there."
)
PASSKEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = " The pass key is"


class Passkey(FittedTask):
    """What is the pass key?

    From Landmark Attention (Mohtashami and Jaggi 2023, https://arxiv.org/abs/2305.16300), worded as in the public code
    of LongLoRA; *Effective Long-Context Scaling* (Xiong et al. 2023, https://arxiv.org/abs/2309.16039) uses it as well.
    Unlike there, the noise on both sides consists of whole sentences, and the first number that the model generates has
    to be the key, whatever its tokens are.
    """

    name = "passkey"
    max_new_tokens = 16
    varies_depth = True

    @override
    def draft(self, asked: Request) -> Draft:
        key, drawn_depth = str(asked.rng.randint(1, 50000)), asked.rng.random()
        depth = drawn_depth if asked.depth is None else asked.depth

        def wording(count: int) -> tuple[str, str]:
            before = place(depth, count)
            lines = (INSTRUCTION, _noise(before), PASSKEY.format(key=key), _noise(count - before), QUESTION)
            return "\n".join(lines), ANSWER_PREFIX

        return Draft(wording, (key,), f" {key}", "first_number", depth=lambda count: place(depth, count) / count)


def _noise(count: int) -> str:
    """Return sentences of noise; on both sides of the key the first is the same."""
    return " ".join(islice(cycle(NOISE_SENTENCES), count))
