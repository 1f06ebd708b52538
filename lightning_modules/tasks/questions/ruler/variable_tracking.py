"""RULER's variable tracking: a chain of assignments, scattered over a long text, is followed to its end."""

import random
from typing import NamedTuple

from typing_extensions import override

from lightning_modules.tasks.questions.budget import most_units
from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task

HOPS = 4
EXAMPLE_TOKENS = 500
LEAST_LINES = 5
"""As many as there are assignments: each stands before a line of its own."""

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_ANSWER_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the"
    " value {value}, they are: "
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Chain(NamedTuple):
    """Variables, each assigned the one before it, and the value of the first.

    Attributes:
        names: The variables.
        value: Five digits.
        seed: Decides where in a text they are assigned.
    """

    names: tuple[str, ...]
    value: str
    seed: int


class VariableTracking(Task):
    """RULER's ``vt`` (https://arxiv.org/abs/2404.06654, Section 3.3): one chain of 4 hops in repeated noise.

    An example with its answer stands before the question: names of three letters in a text of 500 tokens, or of 5
    lines if those take more. The wordings are those of https://github.com/NVIDIA/RULER, whose answer prefix ends with a
    space. Otherwise than there, the example is drawn anew for each question, the names of a question and the two
    values always differ, and a length that is too short is refused (the original tries for ever).
    """

    name = "vt"
    max_new_tokens = 30

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        shown, asked = draw_chain(rng, letters=3), draw_chain(rng, letters=5)
        while shown.value == asked.value:
            asked = draw_chain(rng, letters=5)
        example = worked_example(shown, _example_lines(prompter, shown))
        prefix = answer_prefix(asked)

        def wording(lines: int) -> tuple[str, str]:
            return f"{example}\n{question(asked, lines)}", prefix

        lines = self.fit(prompter, length, wording, least=LEAST_LINES)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=wording(lines)[0],
            answer_prefix=prefix,
            answers=asked.names,
            target=" ".join(asked.names),
            max_new_tokens=self.max_new_tokens,
        )


def draw_chain(rng: random.Random, letters: int) -> Chain:
    """A chain of distinct names, none of which is the keyword."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(_LETTERS, k=letters))
        if name != "VAR" and name not in names:
            names.append(name)
    return Chain(tuple(names), str(rng.randrange(10000, 99999)), rng.getrandbits(64))


def worked_example(chain: Chain, lines: int) -> str:
    """A question with its answer, as it precedes the one that is asked."""
    return f"{question(chain, lines)}{answer_prefix(chain)} {' '.join(chain.names)}\n"


def question(chain: Chain, lines: int) -> str:
    """A haystack of so many lines with the assignments, and what is asked of it."""
    return _TEMPLATE.format(context=_context(chain, lines), value=chain.value)


def answer_prefix(chain: Chain) -> str:
    """How the answer begins."""
    return _ANSWER_PREFIX.format(count=len(chain.names), value=chain.value)


def _example_lines(prompter: Prompter, chain: Chain) -> int:
    def tokens(lines: int) -> int:
        return prompter.count(worked_example(chain, lines), "")

    if tokens(LEAST_LINES) > EXAMPLE_TOKENS:
        return LEAST_LINES
    return most_units(tokens, EXAMPLE_TOKENS, least=LEAST_LINES)


def _context(chain: Chain, lines: int) -> str:
    first, *others = chain.names
    assignments = [f"VAR {first} = {chain.value}"]
    assignments += [f"VAR {name} = VAR {before} " for before, name in zip(chain.names, others, strict=False)]
    text = [NOISE] * lines
    places = sorted(random.Random(chain.seed).sample(range(lines), len(assignments)))
    for before, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
        text.insert(place + before, assignment)
    return "\n".join(text)
