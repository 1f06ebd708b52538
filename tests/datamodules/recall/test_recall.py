import hashlib
from itertools import islice

import pytest

from datamodules.recall import ABOUT, GET, SET, RecallDataModule, recall_documents, recall_tokenizer
from datamodules.recall.documents import recall_questions, recall_records
from datamodules.recall.language import field_values, genre_words

FAR = 128  # words: beyond the short context of the quickstart, K + d = 64 + 64


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    return [text.split(" ") for text in recall_documents(40, length=511, seed=3)]


def events(words: list[str], marker: str) -> list[int]:
    """Where the marker stands with its whole event behind it; the document's end may cut the last one."""
    return [index for index, word in enumerate(words[:-2]) if word == marker]


@pytest.mark.parametrize("length", [1, 2, 63, 511])
@pytest.mark.parametrize("slot", [4, 5, 16])
def test_documents_have_exactly_the_words_asked_for(length, slot):
    for text in recall_documents(5, length=length, slot=slot, seed=0):
        assert len(text.split(" ")) == length
        assert "" not in text.split(" ")


def test_every_recalled_value_is_the_one_that_was_set(documents):
    distances = []
    for words in documents:
        values = {}
        for index in sorted(events(words, SET) + events(words, GET)):
            marker, field, value = words[index : index + 3]
            if marker == SET:
                assert field not in values
                assert value in field_values()[field]
                values[field] = value
            else:
                assert value == values[field]
                distances.append(index + 1 - max(i for i in range(index) if words[i] == field))
    assert len(distances) > 10 * len(documents)
    assert 0.15 < sum(distance > FAR for distance in distances) / len(distances) < 0.5


def test_one_token_per_word_with_offsets_and_no_unknown_word():
    tokenizer = recall_tokenizer()
    for text in recall_documents(20, length=200, slot=5, seed=5):
        encoded = tokenizer(text, return_offsets_mapping=True)
        assert encoded.input_ids[0] == tokenizer.bos_token_id
        assert len(encoded.input_ids) == 201
        assert tokenizer.unk_token_id not in encoded.input_ids
        assert [text[start:end] for start, end in encoded.offset_mapping[1:]] == text.split(" ")
        assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == text
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer))), "no two words share a token"


def test_rows_of_the_data_module_are_one_document_each(tmp_path):
    module = RecallDataModule(sequence_length=40, train_documents=6, validation_documents=2, cache_dir=str(tmp_path))
    module.setup("fit")
    rows = [module.rows[index] for index in range(len(module.rows))]
    assert len(rows) == 6
    texts = recall_documents(6, length=39, seed=0)
    for row, text in zip(rows, texts, strict=True):
        assert row["document_boundaries"] == [0, 40]
        assert row["input_ids"].tolist() == recall_tokenizer()(text)["input_ids"]
    (document,) = islice(module.val_dataloader(), 1)
    assert document["text"] == [next(recall_documents(1, length=39, seed=1))]


def test_the_documents_are_the_same_as_before_dialects_and_records():
    digest = hashlib.sha256()
    for settings in ({"length": 511}, {"length": 60, "slot": 4, "seed": 3}, {"length": 1023, "slot": 5, "seed": 1}):
        for text in recall_documents(30, **settings):
            digest.update(text.encode())
    assert digest.hexdigest() == "112d0d1b569f5c01a6c34271e7fc7e6eca77b6c6595a1fb85475c19ad8489de5"


OPTIONS = ({}, {"slot": 5}, {"second_dialect": 0.5})


@pytest.mark.parametrize("options", OPTIONS)
def test_records_know_what_each_word_is_and_where_it_stands(options):
    everything = {
        word for table in (field_values(), genre_words()) for pair in table.items() for word in (pair[0], *pair[1])
    }
    far = 0
    for record in recall_records(10, length=511, seed=5, **options):
        words, text = record.text.split(" "), record.text
        assert [text[start:end] for start, end in record.offsets] == words
        for index, word in enumerate(record.words):
            is_answer = index >= 2 and words[index - 2] == GET
            is_about = index >= 1 and words[index - 1] == ABOUT
            is_local = word.text not in everything | {GET, SET, ABOUT}
            expected = "answer" if is_answer else "about" if is_about else "local" if is_local else "other"
            assert word.kind == expected
            said = [before for before in range(index) if words[before] == word.text]
            assert word.distance == (index - said[-1] if is_answer else 0)
        spans = record.spans("answer", farther_than=FAR)
        assert spans == [o for o, w in zip(record.offsets, record.words, strict=True) if w.distance > FAR]
        assert len(record.spans("answer")) > len(spans)
        far += len(spans)
    assert far > 10


@pytest.mark.parametrize("length", [8, 9, 20, 511])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.2), (0.4, 0.6), (0.7, 0.7)])
def test_a_question_is_answered_in_one_place_only(length, low, high):
    for record in recall_questions(20, length=length, depth=(low, high), slot=4 if length < 100 else 16, seed=7):
        words = record.text.split(" ")
        assert len(words) == length
        field, value = words[-2:]
        assert words.count(value) == 2, "there is room for the fact"
        assert record.words[-1][:3] == (value, "answer", length - 1 - words.index(value))
        assert [words[-3], words[words.index(value) - 2]] == [GET, SET]
        assert [i for i, word in enumerate(words[:-2]) if word == field] == [words.index(value) - 1]
        assert length < 100 or low * length - 2 <= words.index(value) <= high * length + 3
