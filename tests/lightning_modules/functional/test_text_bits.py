"""Bits per byte against sums over single bytes."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_modules.functional import long_perplexity
from lightning_modules.functional.text_bits import TextBits, add_bits, text_bits

pytestmark = pytest.mark.core

TEXTS = st.text(alphabet="ab é你😀\u0301\n", min_size=2, max_size=40)


def cut(text, generator):
    """A random segmentation of a text into tokens."""
    ends = sorted({*generator.sample(range(1, len(text) + 1), generator.randint(1, len(text))), len(text)})
    return [[start, end] for start, end in zip([0, *ends], ends, strict=False)]


def byte_bits(text, generator):
    """Random bits of each byte of each character."""
    return [[generator.uniform(0, 9) for _ in character.encode()] for character in text]


def measure(text, bits, tokens, spans, scored=None, evaluator=None):
    sums = [sum(sum(bits[place]) for place in range(start, end)) for start, end in tokens]
    scored = torch.ones(len(tokens), dtype=torch.bool) if scored is None else scored
    log_likelihood = -torch.tensor(sums, dtype=torch.float64) * math.log(2)
    spans = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
    return text_bits(text, log_likelihood, torch.tensor(tokens), scored, spans, evaluator)


@given(TEXTS, st.integers(0, 10**6))
def test_any_tokens_of_a_model_of_bytes_give_its_bits_but_for_the_stated_bound(text, seed):
    """The same model with other tokens: only tokens that cross a border can differ, by at most ``crossing_bits``."""
    generator = random.Random(seed)
    bits, inside = byte_bits(text, generator), [generator.random() < 0.5 for _ in text]
    spans = [[place, place + 1] for place in range(len(text)) if inside[place]]  # touching spans are not merged
    expected = sum(sum(own) for own, key in zip(bits, inside, strict=True) if key)
    key_bytes = sum(len(character.encode()) for character, key in zip(text, inside, strict=True) if key)
    exact = measure(text, bits, [[place, place + 1] for place in range(len(text))], spans)
    assert (exact.crossing_bits, exact.key_bytes, exact.bytes) == (0, key_bytes, len(text.encode()))
    assert exact.key_bits == pytest.approx(expected)
    found = measure(text, bits, cut(text, generator), spans)
    assert (found.key_bytes, found.bytes, found.bits) == (exact.key_bytes, exact.bytes, pytest.approx(exact.bits))
    assert abs(found.key_bits - expected) <= found.crossing_bits + 1e-9


def test_a_token_across_a_border_counts_by_its_bytes_inside():
    found = measure("ab你c", [[1], [1], [1, 1, 1], [1]], [[0, 2], [2, 4]], [[1, 3]])
    assert found.key_bits == pytest.approx(2 * 1 / 2 + 4 * 3 / 4)
    assert found.crossing_bits == pytest.approx(2 * 1 / 2 + 4 * 3 / 4)
    assert found.key_bytes == 4


def test_spans_of_a_file_may_overlap_and_exceed_the_text():
    bits = [[1], [2], [3], [4]]
    tokens = [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert measure("abcd", bits, tokens, [[0, 2], [1, 2], [3, 9], [20, 30]]) == measure(
        "abcd", bits, tokens, [[0, 2], [3, 4]]
    )


def test_for_equal_tokens_it_is_longppl():
    generator = random.Random(0)
    text = "abcdefgh" * 4
    tokens = [[place, place + 2] for place in range(0, 32, 2)]
    key = torch.tensor([generator.random() < 0.4 for _ in tokens])
    offsets = torch.tensor(tokens)
    bits = byte_bits(text, generator)
    found = measure(text, bits, tokens, offsets[key].tolist(), evaluator=offsets)
    log_likelihood = torch.tensor([-math.log(2) * (bits[a][0] + bits[a + 1][0]) for a, _ in tokens])
    assert found.numbers()["longppl_per_evaluator_token"] == pytest.approx(
        float(long_perplexity(log_likelihood, key)), rel=1e-5
    )
    assert found.evaluator_key_tokens == int(key.sum())


def test_special_and_unscored_tokens_have_no_bytes():
    """The bits per byte of lm-evaluation-harness, where ``<s>`` precedes the text, and without the first token."""
    tokens, bits = [[0, 0], [0, 3], [3, 5], [0, 0]], [[2]] * 5
    scored = torch.tensor([False, True, True, False])
    assert measure("abcde", bits, tokens, [[3, 5]], scored).numbers()["bits_per_byte"] == pytest.approx(2)
    without = measure("abcde", bits, tokens[1:3], [], torch.tensor([False, True]))
    assert (without.bytes, without.bits) == (2, pytest.approx(4))
    assert math.isnan(without.numbers()["key_bits_per_byte"])


def test_prompts_between_scored_tokens_have_no_bytes_and_no_key_tokens():
    """As in a chat, whose key tokens are also in the turns of the user."""
    tokens = [[0, 2], [2, 4], [4, 6], [6, 8], [8, 10]]
    scored = torch.tensor([False, True, False, False, True])
    bits = [[1]] * 10
    found = measure("abcdefghij", bits, tokens, [[2, 6], [8, 10]], scored, torch.tensor(tokens))
    assert (found.bytes, found.bits) == (4, pytest.approx(4))
    assert (found.key_bytes, found.key_bits, found.evaluator_key_tokens) == (4, pytest.approx(4), 2)


def test_sums_of_documents_and_infinite_numbers():
    total = add_bits([TextBits(8.0, 4, 2.0, 0.5, 2, 1), TextBits(2.0, 1, 4.0, 0.0, 1, 2)])
    assert total == TextBits(10.0, 5, 6.0, 0.5, 3, 3)
    assert total.numbers() == {"key_bits_per_byte": 2, "bits_per_byte": 2, "longppl_per_evaluator_token": 4}
    assert add_bits([]) == TextBits()
    assert TextBits(1.0, 1, 5000.0, 0.0, 1, 1).numbers()["longppl_per_evaluator_token"] == math.inf
