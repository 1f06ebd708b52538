import re
from collections import Counter

import pytest

from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.ruler import WORDS
from tests.support import answerers

TEXT = (
    r"Below is a numbered list of words\. In these words, some appear more often than others\. Memorize the ones that"
    r" appear most often\.\n(.*)\nQuestion: What are the 10 most common words in the above list\?"
)
PREFIX = " Answer: The top 10 words that appear most often in the list are:"


@pytest.fixture(scope="module")
def prompters():
    return answerers.prompters(
        ["Below is a numbered list of words. Question: Answer: 1. one 2. two 34. " + " ".join(WORDS)]
    )


def listed(text):
    numbered = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    assert " ".join(f"{number}. {word}" for number, word in numbered) == text
    return Counter(word for _, word in numbered)


@pytest.mark.parametrize(
    ("length", "shown", "asked"),
    [(2000, (20, 3, 1), (6, 1)), (4096, (40, 10, 3), (30, 3))],
)
def test_words_repeat_as_in_ruler(prompters, length, shown, asked):
    example = find_tasks(["cwe"])[0].example(prompters["words"], length, 0)
    whole = re.fullmatch(rf"{TEXT}{re.escape(PREFIX)} (.*)\n{TEXT}", example.prompt)
    first, answer, second = (listed(text) for text in whole.groups())
    words, common, others = shown
    assert sorted(first.values()) == [others] * (words - 10) + [common] * 10
    assert {word for word, count in first.items() if count == common} == set(answer)
    common, others = asked
    assert [second[word] for word in example.answers] == [common] * 10
    assert set(second.values()) == {common, others}
    assert len(second) >= 20
    assert not first.keys() & second.keys()
    assert example.answer_prefix == PREFIX
    assert listed(example.target.strip()) == Counter(example.answers)


def test_the_shortest_list_has_ten_other_words(prompters):
    def words(length):
        try:
            prompt = find_tasks(["cwe"])[0].example(prompters["words"], length, 0).prompt
        except ValueError:
            return None
        return len(listed(re.fullmatch(rf"{TEXT}{re.escape(PREFIX)} .*\n{TEXT}", prompt)[2]))

    found = [words(length) for length in range(584, 603, 3)]  # a word takes three tokens: number, point and word
    assert found[0] is None
    assert [count for count in found if count is not None] == [20, 21, 22, 23]


def test_long_lists_have_synthetic_words(prompters):
    lengths = (4096, 10_000, 13_000, 30_000)
    for length, real in zip(lengths, (True, True, False, False), strict=True):
        prompt = find_tasks(["cwe"])[0].example(prompters["words"], length, 0).prompt
        words = set(re.findall(r"\d+\. (\S+)", prompt))
        assert words <= set(WORDS) if real else len(words & set(WORDS)) < 0.01 * len(words)
    assert len(words) > len(WORDS)
