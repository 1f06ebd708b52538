"""RULER's variable tracking: follow a chain of assignments that is scattered over a long text."""

import random
from typing import NamedTuple

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, most_units

HOPS = 4
EXAMPLE_TOKENS = 500
MIN_LINES = 5  # one for each assignment, which precedes it

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
    """Variables, each assigned the one before it; the first one's value of five digits; and a seed for their places."""

    names: tuple[str, ...]
    value: str
    seed: int


class VariableTracking(FittedTask):
    """RULER's ``vt`` (https://arxiv.org/abs/2404.06654, Section 3.3): one chain of 4 hops in repeated noise.

    An example with its answer precedes the question: names of three letters in a text of 500 tokens, or of 5 lines if
    those take more. The wordings are those of https://github.com/NVIDIA/RULER, whose answer prefix ends with a space.
    Unlike there, the example is drawn again for each question, the names of a question and the two values always
    differ, and a length that is too short is refused (the original never returns).
    """

    name = "vt"
    max_new_tokens = 30

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        shown, chain = draw_chain(rng, letters=3), draw_chain(rng, letters=5)
        while shown.value == chain.value:
            chain = draw_chain(rng, letters=5)
        example = worked_example(shown, _example_lines(asked.prompter, shown))
        prefix = answer_prefix(chain)

        def wording(lines: int) -> tuple[str, str]:
            return f"{example}\n{question(chain, lines)}", prefix

        return Draft(wording, chain.names, " ".join(chain.names), min_units=MIN_LINES)


def draw_chain(rng: random.Random, letters: int) -> Chain:
    """Draw a chain of distinct names, none of which is the keyword."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(_LETTERS, k=letters))
        if name != "VAR" and name not in names:
            names.append(name)
    return Chain(tuple(names), str(rng.randrange(10000, 99999)), rng.getrandbits(64))


def worked_example(chain: Chain, lines: int) -> str:
    """Return an example question with its answer, which precedes the actual question."""
    return f"{question(chain, lines)}{answer_prefix(chain)} {' '.join(chain.names)}\n"


def question(chain: Chain, lines: int) -> str:
    """Return a haystack of ``lines`` lines with the assignments, and the question about it."""
    return _TEMPLATE.format(context=_write_context(chain, lines), value=chain.value)


def answer_prefix(chain: Chain) -> str:
    """Return the beginning of the answer."""
    return _ANSWER_PREFIX.format(count=len(chain.names), value=chain.value)


def _example_lines(prompter: Prompter, chain: Chain) -> int:
    def tokens(lines: int) -> int:
        return prompter.count(worked_example(chain, lines), "")

    if tokens(MIN_LINES) > EXAMPLE_TOKENS:
        return MIN_LINES
    return most_units(tokens, EXAMPLE_TOKENS, minimum=MIN_LINES)


def _write_context(chain: Chain, lines: int) -> str:
    first, *others = chain.names
    assignments = [f"VAR {first} = {chain.value}"]
    assignments += [f"VAR {name} = VAR {before} " for before, name in zip(chain.names, others, strict=False)]
    text = [NOISE] * lines
    places = sorted(random.Random(chain.seed).sample(range(lines), len(assignments)))
    for before, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
        text.insert(place + before, assignment)
    return "\n".join(text)
