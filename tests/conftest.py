import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported: a hub id must fail, not wait

import hypothesis
import lightning.pytorch  # noqa: F401  Its logger keeps the stderr of the first import: not that of a test.
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# The same examples in every run, however busy the machine is.
hypothesis.settings.register_profile("longce", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("longce")

torch.set_num_threads(1)  # tiny models: threads only wait for each other

SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu"]


def make_text(words, seed=0):
    """Made-up prose in which names come back: ASCII, with punctuation and line breaks."""
    generator = random.Random(seed)
    lexicon = ["".join(generator.choices(SYLLABLES, k=generator.randint(1, 4))) for _ in range(120)]
    parts = []
    for number in range(words):
        parts.append(generator.choice(lexicon))
        parts.append(generator.choices([" ", ", ", ". ", ".\n"], weights=[12, 2, 2, 1])[0])
        if number % 37 == 0:
            parts.append(f"{generator.randint(0, 9999)} ")
    return "".join(parts).strip()


def byte_level_tokenizer(corpus, vocab_size=400):
    """Like GPT-2's and Llama-3's; with a first token that stands for no character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def metaspace_tokenizer(corpus, vocab_size=340):
    """Like Llama-2's: spaces belong to the word behind them. It knows every ASCII character."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "</s>"],
        initial_alphabet=[chr(code) for code in range(ord("!"), 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def tiny_config(architecture="llama", vocab_size=400, **overrides):
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.4,  # random models must have opinions, or no token is a key token
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    return AutoConfig.for_model(architecture, vocab_size=vocab_size, **{**settings, **overrides})


def tiny_model(
    architecture="llama", vocab_size=400, *, seed=0, dtype=torch.float32, attn_implementation="sdpa", **overrides
):
    torch.manual_seed(seed)
    config = tiny_config(architecture, vocab_size, **overrides)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype).eval()


@pytest.fixture(scope="session")
def corpus():
    return [make_text(400, seed) for seed in range(8)]


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return byte_level_tokenizer(corpus)


@pytest.fixture(scope="session")
def other_tokenizer(corpus):
    return metaspace_tokenizer(corpus)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", len(tokenizer), seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def evaluator_dir(tmp_path_factory, other_tokenizer):
    folder = tmp_path_factory.mktemp("evaluator")
    # Not Qwen2: transformers would replace the stored tokenizer of such a folder by Qwen2's, of other tokens.
    tiny_model("qwen3", len(other_tokenizer), seed=2, head_dim=8).save_pretrained(folder)
    other_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def book_folder(tmp_path_factory):
    """Books in the layout of PG-19, of common words and of one that names the split."""
    folder = tmp_path_factory.mktemp("books")
    generator = random.Random(0)
    words = ["the", "a", "of", "sea,", "ship", "let", "city", "wind.", "captain's", "rope", "Recall", "—", "night"]
    for split in ("train", "test"):
        (folder / split).mkdir()
        for book in range(3):
            text = "\n".join(generator.choices([*words, split], k=2000))
            (folder / split / f"{book}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test may find what another run left in the user's cache."""
    monkeypatch.setenv("LONGCE_CACHE", str(tmp_path_factory.mktemp("cache")))
