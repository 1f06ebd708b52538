import pickle
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest

from datamodules import token_store
from datamodules.sources import Document
from datamodules.token_store import TokenStore, build_token_store
from lightning_modules.tokenization import load_tokenizer


@dataclass
class Texts:
    """Documents in memory that count how often they are read; an exception is raised in its turn."""

    texts: list
    version: str = "1"
    reads: list = field(default_factory=list)

    def __iter__(self):
        self.reads.append(len(self.reads))
        for number, text in enumerate(self.texts):
            if isinstance(text, BaseException):
                raise text
            yield Document(str(number), text)

    def fingerprint(self):
        return self.version


def build(source, tokenizer, cache_dir, **kwargs):
    return build_token_store(source, load_tokenizer(tokenizer), cache_dir=cache_dir, **kwargs)


def test_tokens_borders_and_end_of_text(word_tokenizer, tmp_path):
    store = build(Texts(["a b", "c", "d e f"]), word_tokenizer, tmp_path)
    assert store.tokens.tolist() == [1, 2, 0, 3, 0, 4, 5, 6, 0]
    assert store.document_borders.tolist() == [0, 3, 5, 9]
    assert store.tokens.dtype == np.dtype("<u2")
    assert (store.manifest["documents"], store.manifest["tokens"]) == (3, 9)


def test_wide_vocabulary_without_end_of_text(wide_tokenizer, tmp_path):
    store = build(Texts(["w69999 a", "b"]), wide_tokenizer, tmp_path)
    assert store.tokens.tolist() == [70_008, 1, 2]
    assert store.tokens.dtype == np.dtype("<u4")


@pytest.mark.parametrize("bounds", [(1, 10**6), (10**6, 1), (2, 10**6)])
def test_batches_do_not_show(byte_tokenizer, tmp_path, monkeypatch, bounds):
    texts = ["the cat sat", "naïve café 🙂", "on the mat"]
    whole = build(Texts(texts), byte_tokenizer, tmp_path / "whole")
    monkeypatch.setattr(token_store, "BATCH_DOCUMENTS", bounds[0])
    monkeypatch.setattr(token_store, "BATCH_CHARACTERS", bounds[1])
    split = build(Texts(texts), byte_tokenizer, tmp_path / "split")
    tokenizer = load_tokenizer(byte_tokenizer)
    expected = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert whole.tokens.tolist() == split.tokens.tolist() == expected
    assert whole.document_borders.tolist() == split.document_borders.tolist()


def test_second_build_reads_nothing(word_tokenizer, tmp_path):
    source = Texts(["a b"])
    first, second = (build(source, word_tokenizer, tmp_path) for _ in range(2))
    assert source.reads == [0]
    assert first.folder == second.folder


def test_address_depends_on_all_that_matters(word_tokenizer, bos_eos_tokenizer, tmp_path, monkeypatch):
    stores = [
        build(Texts(["a b"]), word_tokenizer, tmp_path),
        build(Texts(["a b"], version="2"), word_tokenizer, tmp_path),
        build(Texts(["a b"]), bos_eos_tokenizer, tmp_path),  # the same vocabulary
        build(Texts(["a b"]), word_tokenizer, tmp_path, add_special_tokens=True),
    ]
    monkeypatch.setattr(token_store, "FORMAT", token_store.FORMAT + 1)
    stores.append(build(Texts(["a b"]), word_tokenizer, tmp_path))
    assert len({store.folder for store in stores}) == 5


def test_special_tokens_are_optional_and_the_end_is_marked_once(bos_eos_tokenizer, tmp_path):
    plain = build(Texts(["a b"]), bos_eos_tokenizer, tmp_path)
    special = build(Texts(["a b"]), bos_eos_tokenizer, tmp_path, add_special_tokens=True)
    assert plain.tokens.tolist() == [1, 2, 0]
    assert special.tokens.tolist() == [8, 1, 2, 0]


def test_interrupted_build_leaves_no_store(word_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "BATCH_DOCUMENTS", 1)
    with pytest.raises(KeyboardInterrupt):
        build(Texts(["a", "b", KeyboardInterrupt()]), word_tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert build(Texts(["a", "b"]), word_tokenizer, tmp_path).tokens.tolist() == [1, 0, 2, 0]


def test_unwritable_cache_is_found_before_anything_is_read(word_tokenizer, tmp_path):
    (tmp_path / "file").touch()
    source = Texts(["a"])
    with pytest.raises(ValueError, match="Cannot write to the folder"):
        build(source, word_tokenizer, tmp_path / "file")
    assert source.reads == []


def test_damaged_store_is_refused(word_tokenizer, tmp_path):
    store = build(Texts(["a b c"]), word_tokenizer, tmp_path)
    with (store.folder / token_store.TOKENS).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"is damaged: tokens.bin has 9 of 8 bytes"):
        build(Texts(["a b c"]), word_tokenizer, tmp_path)
    (store.folder / token_store.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"is no token store .* Delete it"):
        TokenStore(store.folder)


def test_ids_beyond_the_vocabulary_are_refused(word_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "vocabulary_size", lambda _: 3)
    with pytest.raises(ValueError, match="gave token 3, beyond its vocabulary of 3"):
        build(Texts(["a b c"]), word_tokenizer, tmp_path)


def test_pickles_as_its_path(word_tokenizer, tmp_path):
    store = build(Texts(["a b c"]), word_tokenizer, tmp_path)
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens.tolist() == store.tokens.tolist()


def test_long_documents_are_no_reason_to_warn(byte_tokenizer, tmp_path, caplog, capfd):
    tokenizer = load_tokenizer(byte_tokenizer)
    tokenizer.model_max_length = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_token_store(Texts(["the cat sat on the mat " * 9]), tokenizer, cache_dir=tmp_path)
    assert "maximum" not in caplog.text + "".join(capfd.readouterr())
