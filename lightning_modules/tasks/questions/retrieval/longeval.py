"""LongEval's lines: one number out of a long record."""

from typing_extensions import override

from lightning_modules.tasks.questions.haystacks import Drawn
from lightning_modules.tasks.questions.task import Draft, FittedTask, Request, place
from lightning_modules.tasks.questions.words import NOUNS, key_word

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a"
    " '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding"
    " <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of"
    " a certain line index. Now the record start:\n\n"
)
LINE = "line {key}: REGISTER_CONTENT is <{value}>\n"
QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number."
ANSWER_PREFIX = " Line <{key}>: <REGISTER_CONTENT> is"

LARGEST = 50000
"""Numbers are drawn from 1 to this."""


class LongEvalLines(FittedTask):
    """What is the register content in line brave-otter?

    The task `lines` of LongEval (Li et al. 2023, https://lmsys.org/blog/2023-06-29-longchat), with the words and the
    scoring of its public code. With a chat template the last number of the answer counts, as there. Without one the
    answer prefix is that with which the original asks a base model (MPT-7B-Storywriter), and the first number counts,
    since such a model continues with more lines.

    Unlike there, the budget decides the number of lines, instead of 200 to 1350 fixed ones; line indices come from our
    lists and are distinct; and no other line has the number that is asked for.
    """

    name = "longeval_lines"
    max_new_tokens = 100
    varies_depth = True

    @override
    def draft(self, asked: Request) -> Draft:
        rng = asked.rng
        key, value, drawn_depth = key_word(rng), rng.randint(1, LARGEST), rng.random()
        depth = drawn_depth if asked.depth is None else asked.depth
        prefix = "" if asked.prompter.chat_template else ANSWER_PREFIX.format(key=key)
        taken = {key}

        def draw() -> str:
            other = key_word(rng)
            while other in taken:
                other += f"-{rng.choice(NOUNS)}"  # there is no end to lines
            taken.add(other)
            number = rng.randint(1, LARGEST - 1)
            return LINE.format(key=other, value=number + (number >= value))

        others = Drawn(draw)

        def wording(count: int) -> tuple[str, str]:
            lines = others.first(count)
            lines.insert(place(depth, count), LINE.format(key=key, value=value))
            return HEADER + "".join(lines) + QUESTION.format(key=key), prefix

        return Draft(
            wording,
            answers=(str(value),),
            target=f" <{value}" if prefix else f"The <REGISTER_CONTENT> in line {key} is <{value}",
            match="first_number" if prefix else "last_number",
            depth=lambda count: place(depth, count) / count,
        )
