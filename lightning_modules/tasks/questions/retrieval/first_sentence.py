"""First-sentence retrieval: how did the text begin?"""

import random

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task

QUESTION = "\n\nWhat is the first sentence of the text above? Repeat it word for word."
ANSWER_PREFIX = " The first sentence is:"

STARTS = 10_000
FEWEST_WORDS = 5
MOST_CHARACTERS = 120


class FirstSentence(Task):
    """What is the first sentence of the text?

    The probe of the effective context of *Effective Long-Context Scaling* (Xiong et al. 2023, section 4.1,
    https://arxiv.org/abs/2309.16039), whose words and texts are not published: "we simply prompt the model to return
    the first sentence of the input". The question here is our own. As there, the score is ROUGE-L: its F1, of as many
    generated words as the sentence has. The text begins anywhere in the essays with a sentence of 5 words or more and
    120 characters or fewer. Examples name no depth: it is always the front, and scores by depth of several tasks would
    compare this one's front with the others' middle.

    Args:
        essays: Prose whose first sentence is asked for.
    """

    name = "first_sentence"
    max_new_tokens = 128

    def __init__(self, essays: Essays) -> None:
        self.essays = essays

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        start = self._start(self.random(length, index, seed))

        def wording(count: int) -> tuple[str, str]:
            return " ".join(self.essays.sentences(count, start)) + QUESTION, ANSWER_PREFIX

        prompt, prefix = wording(self.fit(prompter, length, wording, least=2))
        sentence = self.essays.sentences(1, start)[0]
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=(sentence,),
            target=f" {sentence}",
            max_new_tokens=self.max_new_tokens,
            match="rouge_l",
        )

    def _start(self, rng: random.Random) -> int:
        """Where a sentence stands that is neither a heading nor too long to be repeated."""
        first = rng.randrange(STARTS)
        for start in range(first, first + STARTS):
            sentence = self.essays.sentences(1, start)[0]
            if len(sentence) <= MOST_CHARACTERS and len(sentence.split()) >= FEWEST_WORDS:
                return start
        raise ValueError(
            f"The haystack '{self.essays.folder}' has no sentence of {FEWEST_WORDS} words or more and {MOST_CHARACTERS}"
            " characters or fewer that could be asked for: take other prose."
        )
