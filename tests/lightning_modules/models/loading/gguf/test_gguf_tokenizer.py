"""Tokens of GGUF files are those of the tokenizers that they were written from."""

import io
import json

import pytest
import sentencepiece
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from tests.support.gguf_files import tiny_llama, write_gguf

TEXTS = [
    " leading space",
    "In 2019, 1,234.5 items\n\n2020  12 \n3",
    "你好,世界。日本語",
    "😀👩‍👩‍👧 emoji",
    "cafe\u0301 and café",
    "it's DON'T\r\n\r\n\ttabs  ",
    "the item and items of the  space",
]
TRAINING = [*TEXTS * 3, "the items and the space\n\n\n of  the   item " * 20]


@pytest.fixture
def read(tmp_path):
    """The tokenizer of a file that is written from another one."""

    def write_and_read(tokenizer, size, **options):
        torch.manual_seed(0)
        path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(size), tokenizer, **options)
        return load_tokenizer(str(path)).backend_tokenizer

    return write_and_read


@pytest.mark.parametrize("ends", [(None, None), (False, True), (True, False)])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_and_what_is_put_around_a_text(prefix, ends, read):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING * 10),
        model_writer=model,
        vocab_size=380,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    flags = {} if prefix else {"tokenizer.ggml.add_space_prefix": False}
    for name, value in zip(("bos", "eos"), ends, strict=True):
        flags |= {} if value is None else {f"tokenizer.ggml.add_{name}_token": value}
    found = read(original, original.get_piece_size(), values=flags)
    # Without flags, llama.cpp begins a text with BOS.
    begin, end = [original.bos_id()] if ends[0] in (None, True) else [], [original.eos_id()] if ends[1] else []
    for text in TEXTS:
        expected = original.encode(text)
        assert found.encode(text, add_special_tokens=False).ids == expected
        assert found.encode(text).ids == [*begin, *expected, *end]
        assert found.decode(expected) == text


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@pytest.mark.parametrize(
    ("rule", "regex"), [("qwen2", QWEN), ("llama-bpe", LLAMA), ("llama3", LLAMA), ("llama-v3", LLAMA)]
)
def test_rules_of_byte_level_tokenizers(rule, regex, read):
    backend = Tokenizer(models.BPE(ignore_merges=rule != "qwen2"))
    backend.normalizer = normalizers.NFC() if rule == "qwen2" else None
    split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TRAINING, trainers.BpeTrainer(vocab_size=384, initial_alphabet=alphabet))
    # A word of the vocabulary that no merge makes, which Llama 3 takes whole.
    state = json.loads(backend.to_str())
    state["model"]["vocab"]["zqzq"] = len(state["model"]["vocab"])
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    found = read(tokenizer, len(tokenizer), rule=rule)
    for text in [*TEXTS, "zqzq"]:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == expected
        begin = [tokenizer.bos_token_id] if rule != "qwen2" else []
        assert found.encode(text).ids == [*begin, *expected]


def test_a_control_token_that_transformers_would_split_is_refused_by_name(read):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<北begin>", "</s>"]
    )
    backend.train_from_iterator(TRAINING, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<北begin>", eos_token="</s>")
    with pytest.raises(ValueError, match="control token '<北begin>'"):
        read(tokenizer, len(tokenizer))
