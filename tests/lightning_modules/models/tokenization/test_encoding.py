"""A failure of the tokenizer's own code is an error that names the text, and nothing else is caught."""

import pytest

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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_what_ends_a_process_is_not_caught(error, monkeypatch):
    class Interrupted:
        name_or_path = "tokenizer"
        backend_tokenizer = property(lambda self: (_ for _ in ()).throw(error))

    with pytest.raises(error):
        encode_text("a", Interrupted())
    with pytest.raises(error), panics_caught():
        raise error
