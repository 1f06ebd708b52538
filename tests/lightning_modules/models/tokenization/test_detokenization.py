import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from datamodules.recall import recall_tokenizer
from lightning_modules.models.tokenization.detokenization import (
    TokenCharacters,
    count_start_tokens,
    drop_end_tokens,
    token_texts,
)
from tests.conftest import make_text
from tests.support.texts import sentencepiece_like

TEXT = "Über naïve cafés, 日本語 🙂🙃 and ba\n ce; e\u0301"


def token_bytes(tokenizer, ids):
    """How many bytes each token stands for."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    if any(token.startswith("<0x") for token in tokens):
        return [1 if token.startswith("<0x") else len(token.replace("▁", " ").encode()) for token in tokens]
    return [len(token) for token in tokens]  # a letter of a byte-level token is a byte


def reference(text, lengths, low, high):
    """Character by character: it belongs to a stretch that has all its bytes, and to the tokens that have one."""
    owner = [token for token, length in enumerate(lengths) for _ in range(length)]
    kept, spans, byte = "", {}, 0
    for character in text:
        tokens = owner[byte : byte + len(character.encode())]
        byte += len(tokens)
        if low <= tokens[0] and tokens[-1] < high:
            for token in tokens:
                spans[token] = (spans.get(token, (len(kept),))[0], len(kept) + 1)
            kept += character
    return kept, spans


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_every_stretch_of_tokens_matches_a_walk_over_the_characters(kind, tokenizer, corpus):
    tokenizer = tokenizer if kind == "byte-level" else sentencepiece_like(corpus)
    ids = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    lengths = token_bytes(tokenizer, ids)
    text = TEXT if kind == "byte-level" else f" {TEXT}"
    assert sum(lengths) == len(text.encode())
    assert len(ids) > len(text), "some characters are several tokens"
    characters = TokenCharacters(tokenizer)
    for low in range(len(ids)):
        for high in range(low, len(ids) + 1):
            found, offsets = characters(torch.tensor(ids[low:high], dtype=torch.int64))
            expected, spans = reference(text, lengths, low, high)
            assert found == expected
            for token, span in enumerate(offsets.tolist(), start=low):
                assert tuple(span) == spans.get(token, (span[0], span[0]))


@pytest.mark.parametrize("text", [TEXT, "日本 an", " an", "  an", "\nan", "an", " "])
def test_a_document_has_the_characters_that_its_text_has(text, tokenizer, corpus):
    for each in (tokenizer, sentencepiece_like(corpus)):
        encoding = each.backend_tokenizer.encode(text, add_special_tokens=False)
        found, offsets = TokenCharacters(each).decode_document(
            torch.tensor([0 if each is tokenizer else 1, *encoding.ids])
        )
        assert found == text
        assert [tuple(span) for span in offsets.tolist()] == [(0, 0), *encoding.offsets]


@pytest.mark.parametrize("spaces", ["", "  "])
def test_a_space_that_the_decoder_keeps_is_no_part_of_a_document_either(tokenizer, spaces):
    """As of RoBERTa with `add_prefix_space`, which puts none before a text that begins with one."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.post_processor = None
    text = f"{spaces}{TEXT}"
    encoding = backend.encode(text)
    assert backend.decode(encoding.ids) == (spaces or " ") + TEXT
    characters = TokenCharacters(PreTrainedTokenizerFast(tokenizer_object=backend))
    found, offsets = characters.decode_document(torch.tensor(encoding.ids))
    assert found == text
    assert [tuple(span) for span in offsets.tolist()] == encoding.offsets


def test_tokens_that_share_characters(corpus):
    """Byte-pair merges across characters: a token may end one and begin the next."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["日本日月"] * 9, trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=258))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = "日本日月日"
    encoding = backend.encode(text)
    found, offsets = TokenCharacters(tokenizer)(torch.tensor(encoding.ids))
    assert found == text
    _, spans = reference(text, token_bytes(tokenizer, encoding.ids), 0, len(encoding.ids))
    assert [tuple(span) for span in offsets.tolist()] == [spans[token] for token in range(len(encoding.ids))]


def test_special_tokens_stand_for_no_character(tokenizer):
    first, *_ = tokenizer.backend_tokenizer.encode("ba", add_special_tokens=False).ids
    text, offsets = TokenCharacters(tokenizer)(torch.tensor([0, first, 1, first]))
    piece = tokenizer.decode([first])
    assert text == piece * 2
    n = len(piece)
    assert offsets.tolist() == [[0, 0], [0, n], [n, n], [n, 2 * n]]


def test_special_tokens_around_a_document(tokenizer, other_tokenizer):
    ids = torch.tensor([0, 1, 5, 0, 6, 1, 1])
    assert count_start_tokens(ids, tokenizer) == 2
    assert drop_end_tokens(ids, tokenizer).tolist() == [0, 1, 5, 0, 6]
    assert count_start_tokens(ids[:2], tokenizer) == 2
    assert drop_end_tokens(ids[:2], tokenizer).tolist() == []
    unknown = torch.tensor([0, 5, 0, 1])  # of characters that the tokenizer does not know
    assert count_start_tokens(unknown, other_tokenizer) == 0
    assert drop_end_tokens(unknown, other_tokenizer).tolist() == [0, 5, 0]
    both = copy.deepcopy(tokenizer)
    both.unk_token = "</s>"  # as in GPT-2
    assert drop_end_tokens(ids, both).tolist() == [0, 1, 5, 0, 6]


def test_words_of_a_tokenizer_without_a_decoder():
    tokenizer = recall_tokenizer()
    encoding = tokenizer("let city citla").input_ids
    text, offsets = TokenCharacters(tokenizer)(torch.tensor(encoding))
    assert text == " let city citla"
    assert [text[start:stop] for start, stop in offsets.tolist()] == ["", " let", " city", " citla"]


def test_metaspace(other_tokenizer):
    text = make_text(30)
    ids = other_tokenizer.backend_tokenizer.encode(text).ids
    assert TokenCharacters(other_tokenizer)(torch.tensor(ids))[0] == text


def test_unknown_decoders_are_refused(tokenizer):
    for decoder, match in (
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Replace("Ġ", ""), "cannot be decoded one by one"),
    ):
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.decoder = decoder if match == "WordPiece" else decoders.Sequence([decoder, decoders.Strip("T", 1, 0)])
        with pytest.raises(ValueError, match=match):
            TokenCharacters(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_each_token_reads_by_itself(kind, tokenizer, corpus):
    tokenizer = copy.deepcopy(tokenizer) if kind == "byte-level" else sentencepiece_like(corpus)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<Ġ▁>"]})  # no spaces, but a name
    ids = tokenizer.backend_tokenizer.encode("an 🙂 ba", add_special_tokens=False).ids
    special = tokenizer.convert_tokens_to_ids("<Ġ▁>")
    texts = token_texts(tokenizer, [*ids, special, 9999])
    assert "".join(texts[:-2]).lstrip() == "an <0xF0><0x9F><0x99><0x82> ba"
    assert texts[-2:] == ["<Ġ▁>", "<9999>"]


def test_tokens_that_are_joined_in_an_unknown_way_read_as_in_the_vocabulary(corpus):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "ba": 1, "##ce": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [1, 2]) == ["ba", "##ce"]
