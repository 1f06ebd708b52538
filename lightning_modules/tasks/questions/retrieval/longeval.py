"""LongEval's lines: one number out of a long record."""

from typing_extensions import override

from lightning_modules.tasks.questions.example import Example
from lightning_modules.tasks.questions.haystacks import Drawn
from lightning_modules.tasks.questions.prompter import Prompter
from lightning_modules.tasks.questions.task import Task, place
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


class LongEvalLines(Task):
    """What is the register content in line brave-otter?

    The task `lines` of LongEval (Li et al. 2023, https://lmsys.org/blog/2023-06-29-longchat), with the words and the
    scoring of its public code. With a chat template the last number of the answer counts, as there. Without one the
    answer prefix is that with which the original asks a base model (MPT-7B-Storywriter), and the first number counts,
    since such a model goes on with lines of its own.

    Unlike there, the budget decides the number of lines, instead of 200 to 1350 fixed ones; line indices come from our
    own lists and are distinct; and no other line has the number that is asked for.
    """

    name = "longeval_lines"
    max_new_tokens = 100
    varies_depth = True

    @override
    def example(
        self, prompter: Prompter, length: int, index: int, *, seed: int = 0, depth: float | None = None
    ) -> Example:
        self.check_depth(depth)
        rng = self.random(length, index, seed)
        key, value, drawn_depth = key_word(rng), rng.randint(1, LARGEST), rng.random()
        asked_depth = drawn_depth if depth is None else depth
        taken = {key}

        def draw() -> str:
            other = key_word(rng)
            while other in taken:
                other += f"-{rng.choice(NOUNS)}"  # there is no end to lines
            taken.add(other)
            number = rng.randint(1, LARGEST - 1)
            return LINE.format(key=other, value=number + (number >= value))

        others = Drawn(draw)
        prefix = "" if prompter.chat_template else ANSWER_PREFIX.format(key=key)

        def wording(count: int) -> tuple[str, str]:
            lines = others.first(count)
            lines.insert(place(asked_depth, count), LINE.format(key=key, value=value))
            return HEADER + "".join(lines) + QUESTION.format(key=key), prefix

        count = self.fit(prompter, length, wording)
        prompt, prefix = wording(count)
        return Example(
            task=self.name,
            length=length,
            index=index,
            prompt=prompt,
            answer_prefix=prefix,
            answers=(str(value),),
            target=f" <{value}" if prefix else f"The <REGISTER_CONTENT> in line {key} is <{value}",
            max_new_tokens=self.max_new_tokens,
            match="first_number" if prefix else "last_number",
            depth=place(asked_depth, count) / count,
        )
