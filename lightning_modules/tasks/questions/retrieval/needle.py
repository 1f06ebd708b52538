"""Kamradt's needle in a haystack: one odd sentence about San Francisco."""

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task, place

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
ANSWERS = ("eat a sandwich", "sit in Dolores Park", "sunny day")
PROMPT = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n"
    "{context}\n</context>\n\nWhat is the best thing to do in San Francisco? Don't give information outside the"
    " document or repeat your findings"
)
ANSWER_PREFIX = " Here is the most relevant sentence in the context:"

STARTS = 10_000
"""Sentences among which the haystack begins, that not every example of a length and depth be the same."""


class Needle(Task):
    """What is the best thing to do in San Francisco?

    Needle-in-a-Haystack (Kamradt 2023, https://github.com/gkamradt/LLMTest_NeedleInAHaystack), for a grid of lengths
    and depths, with its needle, its question and the words of its prompt for Anthropic's models. Unlike there, no
    language model judges the answer from 1 to 10: the score is the share of "eat a sandwich", "sit in Dolores Park" and
    "sunny day" that the answer holds. The needle stands between whole sentences, and the haystack begins elsewhere in
    the essays for each example, instead of always at the front.

    Args:
        essays: Prose of the haystack.
    """

    name = "needle"
    max_new_tokens = 64
    varies_depth = True

    def __init__(self, essays: Essays) -> None:
        self.essays = essays

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        start, drawn_depth = rng.randrange(STARTS), rng.random()
        asked_depth = drawn_depth if depth is None else depth

        def wording(count: int) -> tuple[str, str]:
            sentences = self.essays.sentences(count, start)
            before = place(asked_depth, count)
            # The needle has a line of its own, as there.
            parts = (" ".join(sentences[:before]), NEEDLE, " ".join(sentences[before:]))
            return PROMPT.format(context="\n".join(part for part in parts if part)), ANSWER_PREFIX

        count = self.fit(prompter, length, wording)
        prompt, prefix = wording(count)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=ANSWERS,
            target=f" {NEEDLE.rstrip('.')}",
            max_new_tokens=self.max_new_tokens,
            depth=place(asked_depth, count) / count,
        )
