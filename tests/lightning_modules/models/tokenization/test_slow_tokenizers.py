"""Tokenizers that report no characters: their offsets are those of fast ones, or there are none."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer

from datamodules.text import TextDataModule
from lightning_modules.models.tokenization.slow_tokenizers import SlowBackend, decoded_offsets
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer, tokenizer_hash
from lightning_modules.scoring.score import score
from tests.conftest import make_text, tiny_model

PLAIN = [make_text(200), " two  spaces\n\nand a line ", "x"]
UNICODE = [
    "Größe, 猫🙂 and 👩‍👧 \n العربية",
    "\ufffd is a character",
    "a\ufffd",
    "a\ufffdb",
    "🙂\ufffd🙂",
    70 * "\ufffd",
]


class Slow:
    """A fast tokenizer that hides its offsets, and may change the text."""

    def __init__(self, tokenizer, change=str):
        self._tokenizer, self._change = tokenizer, change

    def encode(self, text, add_special_tokens=True):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids, skip_special_tokens=False):
        return self._change(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def covered(offsets):
    return sorted({character for start, end in offsets for character in range(start, end)})


@pytest.mark.parametrize("text", PLAIN + UNICODE)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_offsets_are_those_of_the_fast_tokenizer(tokenizer, text, add_special_tokens):
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
    found = SlowBackend(Slow(tokenizer), "x").encode(text, add_special_tokens)
    assert found.ids == expected.ids
    assert found.offsets == expected.offsets
    assert covered(found.offsets) == list(range(len(text)))


def replace_each(ids):
    """Decode bytes as decoders with a fallback do: U+FFFD for each byte of an incomplete character."""
    return bytes(ids).decode(errors="surrogateescape").translate(dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd"))


@pytest.mark.parametrize("text", UNICODE)
@pytest.mark.parametrize(
    "decode",
    [replace_each, lambda ids: bytes(ids).decode(errors="replace"), lambda ids: bytes(ids).decode(errors="ignore")],
)
def test_bytes_have_the_characters_that_they_are_part_of(decode, text):
    expected = [(index, index + 1) for index, character in enumerate(text) for _ in character.encode()]
    assert decoded_offsets(decode, list(text.encode()), text) == (expected, len(text))


def test_a_decoder_that_drops_the_first_space(other_tokenizer):
    text = PLAIN[0].lower()
    expected = other_tokenizer.backend_tokenizer.encode(text)
    decode = other_tokenizer.decode
    slow = Slow(other_tokenizer)
    slow.decode = lambda ids, skip_special_tokens=False: decode(ids).removeprefix(" ")
    assert SlowBackend.offsets(_unchecked(slow), expected.ids, text) == expected.offsets


def _unchecked(tokenizer):
    backend = SlowBackend.__new__(SlowBackend)  # the sample has letters that the made-up vocabulary lacks
    backend._tokenizer, backend._name, backend._skips = tokenizer, "x", False
    return backend


def test_a_tokenizer_that_changes_the_text_is_refused_with_the_place(tokenizer):
    with pytest.raises(ValueError, match=r"'some/model' \(Slow\) .* from character 0 on \('The cat"):
        SlowBackend(Slow(tokenizer, str.lower), "some/model")
    collapsing = SlowBackend(Slow(tokenizer, lambda text: " ".join(text.split(" "))), "x")
    assert collapsing.encode("a b").offsets
    shouting = SlowBackend(Slow(tokenizer, lambda text: text.replace("ü", "u")), "x").encode("a b für c")
    assert shouting.ids, "training reads no offsets"
    with pytest.raises(ValueError, match=r"from character \d on \('(f|ü)"):
        _ = shouting.offsets


@pytest.fixture
def bytes_dir(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    tiny_model("llama", 384, seed=3).save_pretrained(tmp_path / "bytes")
    return tmp_path / "bytes"


def test_a_slow_tokenizer_is_scored_and_trained_on(bytes_dir, evaluator_dir, tmp_path):
    tokenizer = load_tokenizer(str(bytes_dir))
    document = encode_document("Größe, 猫", tokenizer, max_tokens=10)
    assert document["text"] == ["Größe, "]
    assert document["offsets"][0, :5].tolist() == [[0, 1], [1, 2], [2, 3], [2, 3], [3, 4]]
    text = make_text(80)
    (tmp_path / "0.txt").write_text(text)
    result = score(
        [str(tmp_path / "0.txt")],
        str(bytes_dir),
        str(evaluator_dir),
        context_length=32,
        stride=16,
        alpha=0.1,
        beta=-9.0,
    )
    assert result["documents"][0]["tokens"] == len(text.encode())
    assert result["key_tokens"] > 10
    file = str(tmp_path / "0.txt")
    data = TextDataModule(str(bytes_dir), train=file, validation=file, sequence_length=64)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert tokenizer.decode(batch["input_ids"][0]) in text


def test_the_hash_is_of_the_content(bytes_dir, tmp_path):
    shutil.copytree(bytes_dir, tmp_path / "copy")
    first, second = (load_tokenizer(str(folder)) for folder in (bytes_dir, tmp_path / "copy"))
    assert tokenizer_hash(first) == tokenizer_hash(second)
    settings = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_ids": 5}))
    assert tokenizer_hash(load_tokenizer(str(tmp_path / "copy"))) != tokenizer_hash(first)


def test_mistral_common(tmp_path):
    package = Path(pytest.importorskip("mistral_common").__file__).parent
    from transformers.tokenization_mistral_common import MistralCommonBackend

    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    shutil.copy(package / "data" / "tekken_240911.json", tmp_path / "tekken.json")
    tekken = load_tokenizer(str(tmp_path))
    sentencepiece = MistralCommonBackend(str(package / "data" / "mistral_instruct_tokenizer_241114.model.v7"))
    for backend in (tekken.backend_tokenizer, SlowBackend(sentencepiece, "v7")):
        for text in PLAIN + UNICODE:
            offsets = backend.encode(text).offsets
            assert offsets[0] == (0, 0), "<s>"
            assert covered(offsets) == list(range(len(text)))
