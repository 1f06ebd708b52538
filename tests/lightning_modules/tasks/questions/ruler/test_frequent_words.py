import re
from collections import Counter

import pytest

from lightning_modules.tasks.questions.registry import find_tasks
from lightning_modules.tasks.questions.ruler import repeat_by_rank
from lightning_modules.tasks.questions.task import SETTINGS
from tests.support import answerers


@pytest.fixture(scope="module")
def prompters():
    return answerers.prompters(["Read the following coded text. Question: Answer: ... ... abcdef ..."] * 3)


def test_wording_matches_ruler(prompters):
    example = find_tasks(["fwe"])[0].example(prompters["bytes"], 2000, 0)
    text = (
        r"Read the following coded text and track the frequency of each coded word\. Find the three most frequently"
        r" appeared coded words\. (.*)\nQuestion: Do not provide any explanation\. Please ignore the dots '\.\.\.\.'\."
        r" What are the three most frequently appeared words in the above coded text\?"
    )
    words = re.fullmatch(text, example.prompt)[1].split(" ")
    assert all(word == "..." or re.fullmatch("[a-z]{6}", word) for word in words)
    assert [word for word, _ in Counter(words).most_common(4)] == ["...", *example.answers]
    assert example.answer_prefix == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )


def test_frequencies_fall_with_the_square_of_the_rank():
    vocabulary = [f"word{rank}" for rank in range(300)]
    counts = Counter(repeat_by_rank(vocabulary, 100_000, 2.0))
    for rank, word in enumerate(vocabulary, 1):
        assert abs(counts[word] - 100_000 * 0.6079271 / rank**2) < 1


def test_answers_are_more_frequent_from_the_minimum_number_of_words():
    least = SETTINGS["fwe"]["min_words"]
    for words in range(least, 400):
        counts = [count for _, count in Counter(repeat_by_rank(range(10), words, 2.0)).most_common(5)]
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4], words
    counts = Counter(repeat_by_rank(range(10), least - 1, 2.0))
    assert counts[3] == counts[4]
