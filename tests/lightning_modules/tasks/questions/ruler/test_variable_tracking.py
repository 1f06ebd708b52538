import itertools
import random
import re

import pytest

from lightning_modules.tasks.questions.haystacks import NOISE
from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.ruler import draw_chain, scatter_chain
from tests.support import answerers


@pytest.fixture(scope="module")
def prompters():
    return answerers.prompters([f"Memorize and track the chain(s). Question: Find Answer: VAR ABC = 123\n{NOISE}"] * 3)


def test_wording_matches_ruler(prompters):
    example = find_tasks(["vt"])[0].example(prompters["bytes"], 3000, 0)
    text = (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*)\n"
        r"Question: Find all variables that are assigned the value (\d{5}) in the text above\."
    )
    prefix = (
        r" Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assigned the"
        r" value (\d{5}), they are: "
    )
    whole = re.fullmatch(rf"{text}{prefix} (.*)\n\n{text}", example.prompt, re.DOTALL)
    shown, shown_value, again, names, asked, value = whole.groups()
    assert shown_value == again != value
    assert re.fullmatch(prefix, example.answer_prefix)[1] == value
    for context, letters, given, chain in ((shown, 3, shown_value, names.split()), (asked, 5, value, example.answers)):
        lines = context.split("\n")
        assert [line for line in lines if line != NOISE] == [
            f"VAR {chain[0]} = {given}",
            *(f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(chain)),
        ]
        assert len(set(chain)) == 5
        assert all(re.fullmatch(rf"[A-Z]{{{letters}}}", name) for name in chain)
        places = [number for number, line in enumerate(lines) if line != NOISE]
        assert all(lines[place + 1] == NOISE for place in places)  # an assignment stands before a line of noise


def test_names_are_distinct_and_never_the_keyword():
    class Biased(random.Random):
        def choices(self, population, *, k):
            drawn = [*"VAR", *"AAA", *"AAA", *"BBB", *"CCC", *"DDD", *"EEE"]
            self.position = getattr(self, "position", -k) + k
            return drawn[self.position : self.position + k]

    assert draw_chain(Biased(0), hops=4, letters=3).names == ("AAA", "BBB", "CCC", "DDD", "EEE")


def test_the_example_has_500_tokens_or_five_lines(prompters):
    for kind, prompter in prompters.items():
        example = find_tasks(["vt"])[0].example(prompter, 9000, 0)
        shown = example.prompt[: example.prompt.rindex("Memorize")]
        tokens, lines = prompter.count(shown, ""), shown.count(NOISE)
        assert tokens <= 500 < tokens + prompter.count(f"{NOISE}\n", "") or (tokens > 500 and lines == 5), kind
    assert lines == 5  # of single characters


def test_places_of_assignments_are_drawn_evenly():
    rng = random.Random(0)
    counts = [0] * 10
    for _ in range(2000):
        lines = scatter_chain(draw_chain(rng, hops=4, letters=5), 10).split("\n")
        noise = 0
        for line in lines:
            if line == NOISE:
                noise += 1
            else:
                counts[noise] += 1
    assert sum(counts) == 10_000
    assert all(abs(count - 1000) < 100 for count in counts)  # three standard deviations
