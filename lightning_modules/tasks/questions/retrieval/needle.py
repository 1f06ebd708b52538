"""Kamradt's needle in a haystack: one odd sentence about San Francisco."""

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import Essays
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
ANSWERS = ("eat a sandwich", "sit in Dolores Park", "sunny day")
PROMPT = (
    "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n<context>\n"
    "{context}\n</context>\n\nWhat is the best thing to do in San Francisco? Don't give information outside the"
    " document or repeat your findings"
)
ANSWER_PREFIX = " Here is the most relevant sentence in the context:"

STARTS = 10_000
"""Sentences among which the haystack begins, so that examples of one length and depth differ."""


class Needle(FittedTask):
    """What is the best thing to do in San Francisco?

    Needle-in-a-Haystack (Kamradt 2023, https://github.com/gkamradt/LLMTest_NeedleInAHaystack), for a grid of lengths
    and depths, with its needle, its question and the words of its prompt for Anthropic's models. Unlike there, no
    language model judges the answer from 1 to 10: the score is the fraction of "eat a sandwich", "sit in Dolores Park"
    and "sunny day" that the answer holds. The needle is between whole sentences, and the haystack begins elsewhere in
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
    def draft(self, asked: Request) -> Draft:
        start, drawn_depth = asked.rng.randrange(STARTS), asked.rng.random()
        depth = drawn_depth if asked.depth is None else asked.depth

        def wording(count: int) -> tuple[str, str]:
            sentences = self.essays.sentences(count, start)
            before = place(depth, count)
            # The needle has a line to itself, as there.
            parts = (" ".join(sentences[:before]), NEEDLE, " ".join(sentences[before:]))
            return PROMPT.format(context="\n".join(part for part in parts if part)), ANSWER_PREFIX

        return Draft(wording, ANSWERS, f" {NEEDLE.rstrip('.')}", depth=lambda count: place(depth, count) / count)
