"""First-sentence retrieval: how did the text begin?"""

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request

QUESTION = "\n\nWhat is the first sentence of the text above? Repeat it word for word."
ANSWER_PREFIX = " The first sentence is:"

STARTS = 10_000
FEWEST_WORDS = 5
MOST_CHARACTERS = 120


class FirstSentence(FittedTask):
    """What is the first sentence of the text?

    The probe of the effective context of *Effective Long-Context Scaling* (Xiong et al. 2023, section 4.1,
    https://arxiv.org/abs/2309.16039), whose words and texts are not published: "we simply prompt the model to return
    the first sentence of the input". The question here is ours. As there, the score is ROUGE-L: its F1, for as many
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
    def draft(self, asked: Request) -> Draft:
        start = self._start(asked.rng.randrange(STARTS))
        sentence = self.essays.sentences(1, start)[0]

        def wording(count: int) -> tuple[str, str]:
            return " ".join(self.essays.sentences(count, start)) + QUESTION, ANSWER_PREFIX

        return Draft(wording, (sentence,), f" {sentence}", "rouge_l", least=2)

    def _start(self, first: int) -> int:
        """Return the next sentence that is neither a heading nor too long to be repeated."""
        for start in range(first, first + STARTS):
            sentence = self.essays.sentences(1, start)[0]
            if len(sentence) <= MOST_CHARACTERS and len(sentence.split()) >= FEWEST_WORDS:
                return start
        raise ValueError(
            f"The haystack '{self.essays.folder}' has no sentence of {FEWEST_WORDS} words or more and {MOST_CHARACTERS}"
            " characters or fewer that could be asked for: take other prose."
        )
