import threading
import time
from itertools import chain

import numpy as np
import pytest

from datamodules.sources.documents import Document
from datamodules.token_store import tokenize as tokenising
from datamodules.token_store.tokenize import Encoder, tokenized
from lightning_modules.models.tokenization.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(tokenising, "BATCH_DOCUMENTS", 2)


def documents(count, pulled=None):
    for number in range(count):
        if pulled is not None:
            pulled.append(number)
        yield Document(str(number), "abcdefgh"[number % 8] + " b" * (number % 5))


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_batches_are_those_of_the_tokenizer_in_order(word_tokenizer, monkeypatch, ahead):
    monkeypatch.setattr(tokenising, "AHEAD", ahead)
    tokenizer = load_tokenizer(word_tokenizer)
    encoder = Encoder(tokenizer, add_special_tokens=False)

    def unevenly(batch):
        time.sleep(0.01 * ("a" in batch[0].text))
        return encoder(batch)

    batches = list(tokenized(documents(31), unevenly))
    expected = [[*tokenizer(document.text)["input_ids"], 0] for document in documents(31)]
    assert np.concatenate([batch.tokens for batch in batches]).tolist() == list(chain(*expected))
    assert np.concatenate([batch.lengths for batch in batches]).tolist() == list(map(len, expected))
    assert [len(batch.lengths) for batch in batches] == [2] * 15 + [1]
    assert sum(batch.text_bytes for batch in batches) == sum(len(document.text) for document in documents(31))


def test_two_batches_at_once_and_no_more_than_four_read(word_tokenizer):
    encoder = Encoder(load_tokenizer(word_tokenizer), add_special_tokens=False)
    meeting = threading.Barrier(2, timeout=120)
    pulled = []

    def together(batch):
        meeting.wait()
        return encoder(batch)

    for done, _ in enumerate(tokenized(documents(24, pulled), together), start=1):
        assert len(pulled) <= 2 * (done + 3)
    assert len(pulled) == 24


def test_an_error_of_the_tokenizer_stops_the_reading():
    pulled = []

    def broken(batch):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(tokenized(documents(100, pulled), broken))
    assert len(pulled) <= 8


PROMPTS = [
    ("the cat ", "sat on the mat"),  # a token " sat" would cross the border
    ("the cat", " sat on the mat"),
    ("naïve 日", "本 🙂"),
    ("🙂🙂", "🙂"),
    ("", "the cat"),
    ("\n\n", "\n\n the"),
    ("the c", "at"),
    *(("Call me Ishmael. the cat"[:end], "Call me Ishmael. the cat"[end:]) for end in range(1, 24)),
]


@pytest.mark.parametrize("kind", ["byte_tokenizer", "bos_eos_tokenizer"])
def test_the_prompt_is_the_tokens_that_end_in_it(kind, request):
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    encoder = Encoder(tokenizer, add_special_tokens=True)
    found = encoder([Document("", prompt + response, len(prompt)) for prompt, response in PROMPTS])
    expected = []
    for prompt, response in PROMPTS:
        offsets = tokenizer(prompt + response, return_offsets_mapping=True)["offset_mapping"]
        firsts = [index for index, (_, end) in enumerate(offsets) if end > len(prompt)]
        expected.append(firsts[0] if prompt else 0)
    starts = np.cumsum(found.lengths) - found.lengths
    spans = [[start, start + length] for start, length in zip(starts, expected, strict=True) if length]
    assert found.prompt_spans.tolist() == spans
    plain = encoder([Document("", prompt + response) for prompt, response in PROMPTS])
    assert np.array_equal(found.tokens, plain.tokens)
    assert found.text_bytes == sum(len((prompt + response).encode()) for prompt, response in PROMPTS)
    assert len(plain.prompt_spans) == 0
