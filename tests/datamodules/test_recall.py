from itertools import islice

import pytest
from transformers import AutoTokenizer

from datamodules.recall import (
    ABOUT,
    FIELDS,
    GENRES,
    GET,
    SET,
    RecallDataModule,
    field_values,
    genre_words,
    recall_documents,
    recall_tokenizer,
)

FAR = 128  # words: beyond the short context of the quickstart, K + d = 64 + 64


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    return [text.split(" ") for text in recall_documents(40, length=511, seed=3)]


def events(words: list[str], marker: str) -> list[int]:
    """Where the marker stands with its whole event behind it; the document's end may cut the last one."""
    return [index for index, word in enumerate(words[:-2]) if word == marker]


def test_same_seed_same_documents_and_each_depends_on_its_index_only():
    five = list(recall_documents(5, length=60, seed=1))
    assert five == list(recall_documents(5, length=60, seed=1))
    assert five[:2] == list(recall_documents(2, length=60, seed=1))
    assert len(set(five)) == 5


def test_other_seeds_give_other_documents_of_the_same_language():
    assert not set(recall_documents(20, length=60, seed=1)) & set(recall_documents(20, length=60, seed=2))


@pytest.mark.parametrize("length", [1, 2, 63, 511])
@pytest.mark.parametrize("slot", [4, 5, 16])
def test_documents_have_exactly_the_words_asked_for(length, slot):
    for text in recall_documents(5, length=length, slot=slot, seed=0):
        assert len(text.split(" ")) == length
        assert "" not in text.split(" ")


def test_a_slot_without_room_is_refused():
    with pytest.raises(ValueError, match="`slot` must be at least 4, got 3"):
        next(recall_documents(1, length=60, slot=3))


def test_every_recalled_value_is_the_one_that_was_set(documents):
    recalled = 0
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
                recalled += 1
    assert recalled > 10 * len(documents)


def test_many_recalls_reach_farther_than_a_short_context(documents):
    distances = []
    for words in documents:
        for index in events(words, GET):
            field = words[index + 1]
            distances.append(index + 1 - max(i for i in range(index) if words[i] == field))
    assert 0.15 < sum(distance > FAR for distance in distances) / len(distances) < 0.5


def test_genre_words_are_of_the_genre_that_opens_the_document(documents):
    named = 0
    for words in documents:
        assert words[0] in GENRES
        for index in events(words, ABOUT):
            assert words[index + 1] in genre_words()[words[0]]
            named += 1
    assert named > 3 * len(documents)


def test_a_smaller_slot_makes_denser_documents():
    def recalls(slot: int) -> int:
        return " ".join(recall_documents(20, length=511, slot=slot)).split(" ").count(GET)

    assert recalls(5) > 2 * recalls(16)


def test_one_token_per_word_with_offsets_and_no_unknown_word():
    tokenizer = recall_tokenizer()
    for text in recall_documents(20, length=200, slot=5, seed=5):
        encoded = tokenizer(text, return_offsets_mapping=True)
        assert encoded.input_ids[0] == tokenizer.bos_token_id
        assert len(encoded.input_ids) == 201
        assert tokenizer.unk_token_id not in encoded.input_ids
        assert [text[start:end] for start, end in encoded.offset_mapping[1:]] == text.split(" ")
        assert tokenizer.decode(encoded.input_ids, skip_special_tokens=True) == text


def test_no_two_words_share_a_token():
    tokenizer = recall_tokenizer()
    typed = [
        *FIELDS,
        *GENRES,
        *(word for table in (field_values(), genre_words()) for ws in table.values() for word in ws),
    ]
    assert len(set(typed)) == len(typed)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_saved_tokenizer_opens_with_auto_tokenizer(tmp_path):
    tokenizer = recall_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in tmp_path.iterdir()}
    opened = AutoTokenizer.from_pretrained(tmp_path)
    text = next(islice(recall_documents(1, length=100), 1))
    assert opened(text).input_ids == tokenizer(text).input_ids
    for name in ("bos", "eos", "unk", "pad"):
        assert getattr(opened, f"{name}_token_id") == getattr(tokenizer, f"{name}_token_id") is not None


def test_rows_of_the_data_module_are_one_document_each(tmp_path):
    module = RecallDataModule(sequence_length=40, train_documents=6, validation_documents=2, cache_dir=str(tmp_path))
    module.setup("fit")
    rows = [module.rows[index] for index in range(len(module.rows))]
    assert len(rows) == 6
    texts = recall_documents(6, length=39, seed=0)
    for row, text in zip(rows, texts, strict=True):
        assert row["document_borders"] == [0, 40]
        assert row["input_ids"].tolist() == recall_tokenizer()(text)["input_ids"]
    (document,) = islice(module.val_dataloader(), 1)
    assert document["text"] == [next(recall_documents(1, length=39, seed=1))]
