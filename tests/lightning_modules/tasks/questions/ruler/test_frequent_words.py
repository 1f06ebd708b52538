import random
import re
from collections import Counter
from itertools import pairwise

import pytest

from lightning_modules.tasks.questions.ruler.word_lists import MIN_WORDS, FrequentWords, coded_text, coded_words
from tests.support import answerers


@pytest.fixture(scope="module")
def prompters():
    return answerers.prompters(["Read the following coded text. Question: Answer: ... ... abcdef ..."] * 3)


def test_wording_matches_ruler(prompters):
    example = FrequentWords().example(prompters["bytes"], 2000, 0)
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
    vocabulary = ["...", *coded_words(random.Random(0), 299)]
    text = coded_text(vocabulary, 100_000, random.Random(1)).split(" ")
    counts = Counter(text)
    for rank, word in enumerate(vocabulary, 1):
        assert abs(counts[word] - 100_000 * 0.6079271 / rank**2) < 1
    assert sum(word != after for word, after in pairwise(text)) > 50_000  # shuffled, not word by word


def test_answers_are_more_frequent_from_the_minimum_number_of_words():
    vocabulary = ["...", *coded_words(random.Random(0), 9)]
    for words in range(MIN_WORDS, 400):
        counts = [count for _, count in Counter(coded_text(vocabulary, words, random.Random(1)).split()).most_common(5)]
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4], words
    counts = Counter(coded_text(vocabulary, MIN_WORDS - 1, random.Random(1)).split())
    assert counts[vocabulary[3]] == counts[vocabulary[4]]
