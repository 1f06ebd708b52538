import numpy as np
import pytest
import torch
from tokenizers import processors

from datamodules.packing.evaluation_documents import DocumentDataset
from datamodules.sources.documents import Document
from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from tests.support.texts import sentencepiece_like

TEXT = "the cat: naïve café, 日本 and 🙂 smiles\n"


def dataset(tokenizer, *texts, **kwargs):
    documents = [Document(f"name {number}", text) for number, text in enumerate(texts)]
    return DocumentDataset(documents, load_tokenizer(tokenizer), **{"length": None, **kwargs})


@pytest.mark.parametrize("length", [*range(1, 40, 3), None])
def test_text_is_exactly_that_of_the_kept_tokens(byte_tokenizer, length):
    row = dataset(byte_tokenizer, TEXT, length=length)[0]
    offsets, text = row["offsets"].tolist(), row["text"]
    assert TEXT.startswith(text)
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    assert len(row["input_ids"]) == len(offsets) <= (length or 999)
    tokenizer = load_tokenizer(byte_tokenizer)
    for token, (start, end) in zip(row["input_ids"].tolist(), offsets, strict=True):
        decoded = tokenizer.decode([token])
        assert decoded == text[start:end] or "\ufffd" in decoded  # a token may be a part of a character
    if length is None:
        assert text == TEXT == tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize("special", [False, True])
def test_token_ids_have_the_text_that_they_were_made_of(special, corpus):
    """The tokenizer puts a space before a text, with which an evaluator would read other tokens."""
    tokenizer = sentencepiece_like(corpus)
    around = processors.TemplateProcessing(single="<s> </s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = around
    ids = np.array(tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=special).ids)
    documents = [Document("text", TEXT), Document("ids", "", tokens=ids)]
    rows = DocumentDataset(documents, tokenizer, length=None, add_special_tokens=special)
    by_text, by_ids = rows[0], rows[1]
    assert by_ids["text"] == by_text["text"] == TEXT
    assert by_ids["labels"].eq(IGNORE_INDEX).sum() == (2 if special else 1)
    for name in ("input_ids", "offsets", "labels"):
        assert torch.equal(by_ids[name], by_text[name])


def test_special_tokens_stand_for_no_characters(bos_eos_tokenizer):
    row = dataset(bos_eos_tokenizer, "a b", add_special_tokens=True)[0]
    assert row["input_ids"].tolist() == [8, 1, 2], "nothing follows a text"
    assert row["labels"].tolist() == [IGNORE_INDEX, 1, 2]
    assert row["offsets"].tolist() == [[0, 0], [0, 1], [2, 3]]
    assert row["text"] == "a b"


def test_index_past_the_end_gives_an_empty_row(word_tokenizer):
    documents = dataset(word_tokenizer, "a b")
    row = documents[len(documents)]
    assert row.keys() == documents[0].keys()
    assert row["labels"].tolist() == [IGNORE_INDEX]
    assert row["document_boundaries"] == [0, 1]
    assert (row["text"], row["name"]) == ("", "")


def test_empty_documents_are_left_out(word_tokenizer, caplog):
    documents = dataset(word_tokenizer, "a", "\u3000", "b")
    assert [documents[index]["text"] for index in range(len(documents))] == ["a", "b"]
    assert "Skipped 1 empty documents of 3, such as 'name 1'" in caplog.text
