import random
import re
from uuid import UUID

from lightning_modules.tasks.questions.words import ADJECTIVES, NOUNS, key_word, number, synthetic_words, uuid


def test_drawn_words_have_the_right_format():
    rng = random.Random(0)
    for _ in range(200):
        adjective, noun = key_word(rng).split("-")
        assert adjective in ADJECTIVES
        assert noun in NOUNS
        assert re.fullmatch("[1-9][0-9]{6}", number(rng))
        assert UUID(uuid(rng)).version == 4
    assert {number(rng)[0] for _ in range(300)} == set("123456789")


def test_synthetic_words_are_distinct_and_reproducible():
    words = synthetic_words(random.Random(1), 20_000)
    assert len(set(words)) == 20_000
    assert synthetic_words(random.Random(1), 100) == words[:100]
    assert synthetic_words(random.Random(2), 100) != words[:100]
    assert all(re.fullmatch("[a-z]+", word) for word in words)
