import threading
import time
from itertools import chain

import numpy as np
import pytest

from datamodules import tokenising
from datamodules.sources import Document
from datamodules.tokenising import Encoder, tokenised
from lightning_modules.tokenization import load_tokenizer


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

    def unevenly(texts):
        time.sleep(0.01 * ("a" in texts[0]))
        return encoder(texts)

    batches = list(tokenised(documents(31), unevenly))
    expected = [[*tokenizer(document.text)["input_ids"], 0] for document in documents(31)]
    assert np.concatenate([batch.tokens for batch in batches]).tolist() == list(chain(*expected))
    assert np.concatenate([batch.lengths for batch in batches]).tolist() == list(map(len, expected))
    assert [len(batch.lengths) for batch in batches] == [2] * 15 + [1]
    assert sum(batch.text_bytes for batch in batches) == sum(len(document.text) for document in documents(31))


def test_two_batches_at_once_and_no_more_than_four_read(word_tokenizer):
    encoder = Encoder(load_tokenizer(word_tokenizer), add_special_tokens=False)
    meeting = threading.Barrier(2, timeout=20)
    pulled = []

    def together(texts):
        meeting.wait()
        return encoder(texts)

    for done, _ in enumerate(tokenised(documents(24, pulled), together), start=1):
        assert len(pulled) <= 2 * (done + 3)
    assert len(pulled) == 24


def test_an_error_of_the_tokenizer_stops_the_reading():
    pulled = []

    def broken(texts):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(tokenised(documents(100, pulled), broken))
    assert len(pulled) <= 8


def test_text_bytes_are_those_of_utf_8(byte_tokenizer):
    encoder = Encoder(load_tokenizer(byte_tokenizer), add_special_tokens=False)
    assert encoder(["naïve", "🙂"]).text_bytes == 6 + 4
