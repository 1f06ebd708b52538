"""A failure of the tokenizer's own code is an error that names the text, and nothing else is caught."""

import pytest

from datamodules import DocumentCorpus
from datamodules.sources.documents import Document
from datamodules.token_store.tokenize import Encoder
from lightning_modules.models.tokenization.encoding import encode_text, panics_caught
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.tasks.questions.prompter import Prompter
from tests.support.fragile_tokenizer import BREAKING, fragile_tokenizer


@pytest.mark.parametrize(
    "use",
    [
        lambda tokenizer: encode_document(BREAKING, tokenizer, name="bad.txt"),
        lambda tokenizer: encode_document(BREAKING, tokenizer, name="bad.txt", max_tokens=3),
        lambda tokenizer: Encoder(tokenizer, add_special_tokens=False)(
            [Document("good.txt", "a b"), Document("bad.txt", BREAKING)]
        ),
        lambda tokenizer: Prompter(tokenizer).count(BREAKING, "bad.txt"),
    ],
)
def test_a_panic_is_an_error_that_names_the_document(use):
    with pytest.raises(ValueError, match=r"fails on '(bad\.txt|question)' of \d+ characters"):
        use(fragile_tokenizer())


def test_a_document_that_breaks_the_tokenizer_does_not_stop_a_corpus(tmp_path):
    fragile_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "c").mkdir()
    for name, text in {"a": "a b c", "b": BREAKING, "c": "c d"}.items():
        (tmp_path / "c" / f"{name}.txt").write_text(text)
    corpus = DocumentCorpus(str(tmp_path / "c"), tokenizer=str(tmp_path / "tokenizer"), num_workers=0)
    corpus.setup("predict")
    readings = list(corpus.predict_dataloader())
    failed = {ref.file: ref.error for reading in readings for ref in reading["failed"]}
    assert list(failed) == ["b.txt"]
    assert "fails on" in failed["b.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_what_ends_a_process_is_not_caught(error, monkeypatch):
    class Interrupted:
        name_or_path = "tokenizer"
        backend_tokenizer = property(lambda self: (_ for _ in ()).throw(error))

    with pytest.raises(error):
        encode_text("a", Interrupted())
    with pytest.raises(error), panics_caught():
        raise error
