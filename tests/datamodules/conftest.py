import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = ["the cat sat on the mat", "naïve café, 日本 and 🙂 smiles", "Call me Ishmael. Some years ago"]


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """Folder of a byte-level tokenizer: every text can be told from its tokens, some characters take several."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(LINES, trainer)
    return _saved(backend, tmp_path_factory, eos_token="<eos>")


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory):
    """Folder of a tokenizer with one token per word: ``<eos>`` 0, ``a`` 1, ``b`` 2, .. ``h`` 8."""
    return _saved(word_backend(), tmp_path_factory, eos_token="<eos>")


@pytest.fixture(scope="session")
def wide_tokenizer(tmp_path_factory):
    """Like ``word_tokenizer`` with too many words for 16 bits; no end-of-text token."""
    return _saved(word_backend(words=70_000), tmp_path_factory)


@pytest.fixture(scope="session")
def numbered_tokenizer(tmp_path_factory):
    """Like ``word_tokenizer`` with the words ``w0`` 9, ``w1`` 10, .. ``w199``; no end-of-text token."""
    return _saved(word_backend(words=200), tmp_path_factory)


@pytest.fixture(scope="session")
def bos_eos_tokenizer(tmp_path_factory):
    """Like ``word_tokenizer``; its special tokens are ``h`` (8) before and ``<eos>`` (0) behind a text."""
    backend = word_backend()
    tokens = [("h", 8), ("<eos>", 0)]
    backend.post_processor = processors.TemplateProcessing(single="h $A <eos>", special_tokens=tokens)
    return _saved(backend, tmp_path_factory, eos_token="<eos>", bos_token="h")


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def word_backend(words=0):
    vocabulary = ["<eos>", *"abcdefgh", *(f"w{number}" for number in range(words))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _saved(backend, tmp_path_factory, **special_tokens):
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens).save_pretrained(folder)
    return str(folder)
