"""GGUF files are models: their logits and tokens are those of the folders that they were made of."""

import hashlib
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from gguf import Keys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.gguf import conversion
from lightning_modules.models.loading.gguf.architectures import ARCHITECTURES, read_config
from lightning_modules.models.loading.gguf.conversion import convert_gguf
from lightning_modules.models.loading.gguf.metadata import Metadata
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.loading.load import load_backbone, load_config
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.records import summarize
from lightning_modules.scoring.score import score
from longce.cli.main import main
from tests.support.gguf_files import tiny_llama, tiny_model, write_gguf

TEXTS = [
    " leading space",
    "In 2019, 1,234.5 items\n\n2020  12 \n3",
    "你好,世界。日本語",
    "😀👩‍👩‍👧 emoji",
    "cafe\u0301 and café",
    "it's DON'T\r\n\r\n\ttabs  ",
    "<|im_end|> is special",
]


@pytest.fixture(scope="module")
def original():
    """A tokenizer by the rule of SmolLM2's, as published: digits, then GPT-2's words."""
    backend = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([*TEXTS, "the items and the space\n\n\n of  the   item " * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=special[0], eos_token=special[1])


@pytest.fixture(scope="module")
def model(original):
    torch.manual_seed(0)
    return tiny_llama(len(original))


@pytest.fixture
def write(tmp_path, model, original):
    return lambda **options: write_gguf(tmp_path / "tiny.gguf", model, original, **options)


def logits(model, count=40):
    with torch.no_grad():
        return model(torch.arange(count).view(1, -1)).logits


def test_logits_and_tokens_are_those_of_the_original(write, model, original, monkeypatch):
    path = str(write())
    backbone, tokenizer = load_backbone(ModelConfig(path)), load_tokenizer(path)
    assert backbone.model.dtype == torch.float32
    torch.testing.assert_close(logits(backbone.model), logits(model))
    # Otherwise the next line shows nothing: transformers alone reads other tokens.
    alone = AutoTokenizer.from_pretrained(Path(path).parent, gguf_file=Path(path).name).backend_tokenizer
    assert [text for text in TEXTS if alone.encode(text).ids != original.backend_tokenizer.encode(text).ids] == TEXTS[
        1:2
    ]
    for text in TEXTS:
        found, expected = (each.backend_tokenizer.encode(text) for each in (tokenizer, original))
        assert (found.ids, found.tokens) == (expected.ids, expected.tokens)
    assert [tokenizer.bos_token, tokenizer.eos_token] == ["<|im_start|>", "<|im_end|>"]
    monkeypatch.delattr(conversion, "_convert")  # it is converted once
    load_backbone(ModelConfig(path))


def test_identity_is_the_hash_of_the_file(write, original):
    path = write()
    assert model_identity(ModelConfig(str(path))) == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.parametrize(("kind", "dtype", "largest"), [("F16", torch.float16, 0.003), ("Q8_0", torch.bfloat16, 0.03)])
def test_other_types_become_half_precision(kind, dtype, largest, write, model):
    found = AutoModelForCausalLM.from_pretrained(convert_gguf(write(kind=kind)))
    assert found.dtype == dtype
    error = (found.model.layers[1].mlp.up_proj.weight.float() - model.model.layers[1].mlp.up_proj.weight).abs()
    assert 0 < error.max() < largest * model.model.layers[1].mlp.up_proj.weight.abs().max()
    assert (logits(found.float()) - logits(model)).abs().max() < largest


def llama_3_factors(factor, *, old=8192, low=1.0, high=4.0, base=10000.0, width=16):
    """The factors that llama.cpp's converter stores for Llama 3.1."""
    found = []
    for place in range(0, width, 2):
        wavelength = 2 * math.pi * base ** (place / width)
        smooth = min(max((old / wavelength - low) / (high - low), 0), 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("values", "factors", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, None, {"rope_type": "linear"}),
        ({}, 4.0, {"rope_type": "llama3", "original_max_position_embeddings": 8192, "high_freq_factor": 4.0}),
    ],
)
def test_scaled_frequencies_are_kept(values, factors, expected, write):
    tensors = {} if factors is None else {"rope_freqs.weight": llama_3_factors(factors, base=10000.0)}
    found = load_config(ModelConfig(str(write(values=values, tensors=tensors)))).rope_parameters
    assert found == {**found, **expected, "factor": 4.0, "rope_theta": 10000.0}


def rope(theta, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def yarn(architecture):
    names = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    return {f"{architecture}.rope.scaling.{name}": value for name, value in names.items()}


YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LOCAL_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    }
}
GEMMA_VALUES = {
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
    "gemma3.rope.freq_base_swa": 700.0,
}
GEMMA = {
    **LOCAL_ROPE,
    "head_dim": 24,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 0.02,
    "sliding_window": 7,
    "layer_types": [*5 * ["sliding_attention"], "full_attention", "sliding_attention"],
    "num_hidden_layers": 7,
}
# Models with no value at its default, and the values of their files beyond sizes, base and epsilon.
MODELS = {
    "llama": ("llama", {"head_dim": 24, "rms_norm_eps": 0.02, **rope(5e5)}, {}),
    "llama-tied": ("llama", {"head_dim": 16, "tie_word_embeddings": True, **rope(3e4)}, {}),
    "llama-biases": ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **rope(3e4)}, {}),
    "llama-yarn": ("llama", {"head_dim": 16, **rope(3e4, **YARN_ROPE)}, yarn("llama")),
    "qwen2": ("qwen2", {"rms_norm_eps": 0.02, **rope(5e5)}, {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, **rope(3e4, **YARN_ROPE)}, yarn("qwen2")),
    "qwen3": ("qwen3", {"head_dim": 24, "rms_norm_eps": 0.02, **rope(5e5)}, {}),
    "gemma3": ("gemma3_text", GEMMA, GEMMA_VALUES),
    "gemma3-untied": ("gemma3_text", {**GEMMA, "tie_word_embeddings": False}, GEMMA_VALUES),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_value_of_a_file_is_used(name, tmp_path, original):
    torch.manual_seed(0)
    model_type, settings, values = MODELS[name]
    written = tiny_model(model_type, len(original), **settings)
    path = write_gguf(tmp_path / f"{name}.gguf", written, original, values=values)
    found = load_backbone(ModelConfig(str(path))).model
    torch.testing.assert_close(logits(found, 200), logits(written, 200), rtol=1e-4, atol=1e-4)


def model_keys():
    """All keys of models that the package gguf knows, for any architecture."""
    groups = [group for name, group in vars(Keys).items() if isinstance(group, type)]
    groups += [group for parent in groups for group in vars(parent).values() if isinstance(group, type)]
    keys = [
        key for group in groups for key in vars(group).values() if isinstance(key, str) and key.startswith("{arch}.")
    ]
    return sorted({key.removeprefix("{arch}.") for key in keys})


USED = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"}
USED |= {"attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"}
USED |= {"rope.scaling.finetuned"}
USED_BY_GEMMA = {"rope.freq_base_swa", "attention.sliding_window"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_other_key_is_refused_by_name(architecture):
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    sizes |= {"attention.sliding_window": 8} if architecture == "gemma3" else {}
    others = {*model_keys(), "made.up"} - USED - (USED_BY_GEMMA if architecture == "gemma3" else set())
    assert len(others) > 80
    for key in others:
        values = {f"{architecture}.{name}": value for name, value in {**sizes, key: 3}.items()}
        with pytest.raises(ValueError, match=rf"{architecture}\.{re.escape(key)}`"):
            read(values)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("key", "value"), [("head_count", [2, 2]), ("head_count", True), ("head_count_kv", 0)])
def test_values_that_are_not_one_number_are_refused_by_name(architecture, key, value):
    sizes = {"block_count": 1, "embedding_length": 8, "attention.head_count": 2, "feed_forward_length": 8}
    values = {f"{architecture}.{name}": size for name, size in {**sizes, f"attention.{key}": value}.items()}
    with pytest.raises(ValueError, match=key):
        read(values)


def read(values):
    metadata = Metadata("tiny.gguf", {"general.architecture": next(iter(values)).partition(".")[0], **values})
    read_config(metadata, {"token_embd.weight": (384, 8), "output_norm.weight": (8,)}, None)
    metadata.check_all_taken()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5000])


BAD = [
    ({}, truncate),
    ({}, lambda path: path.write_bytes(b"PK" + path.read_bytes()[2:])),
    ({"skip": ("model", "lm_head")}, None),
    ({"values": {"split.count": 3}}, None),
    ({"architecture": "nosuch"}, None),
    ({"rule": "nosuch"}, None),
    ({"architecture": "starcoder2"}, None),
    ({"values": {"general.type": "adapter"}}, None),
    *[({"values": {f"llama.{name}": 2**32 - 1}}, None) for name in ("block_count", "embedding_length")],
    *[({"values": {f"llama.{name}": 2**32 - 1}}, None) for name in ("feed_forward_length", "attention.head_count")],
    ({"values": {"llama.attention.scale": 0.3}}, None),
    ({"values": {"tokenizer.ggml.precompiled_charsmap": "abc"}}, None),
    ({"values": {"tokenizer.ggml.remove_extra_whitespaces": True}}, None),
    ({"values": {"llama.rope.scaling.type": "none", "llama.rope.scale_linear": 2.0}}, None),
    ({"tensors": {"blk.0.attn_q.bias": torch.zeros(64)}}, None),
    ({"tensors": {"blk.0.attn_sinks.weight": torch.zeros(4)}}, None),
    ({"tensors": {"blk.2.attn_norm.weight": torch.zeros(64)}}, None),
    ({"skip": ("model.layers.0.self_attn.k", "model.layers.1.self_attn.k")}, None),
    ({"values": {**yarn("llama"), "llama.rope.scaling.yarn_log_multiplier": 0.1}}, None),
    ({"values": {"llama.rope.scaling.type": "longrope"}}, None),
    ({"tensors": {"rope_freqs.weight": torch.arange(1.0, 9.0)}}, None),
]


@pytest.mark.parametrize(("options", "damage"), BAD)
def test_files_that_cannot_be_used_are_refused_in_one_line(options, damage, write):
    path = write(**options)
    if damage is not None:
        damage(path)
    with pytest.raises(ValueError, match=r"tiny\.gguf'") as error:
        convert_gguf(path)
    assert "\n" not in str(error.value)
    assert not list((Path(conversion.default_cache_dir()) / "gguf").glob("*-*"))  # nothing unfinished is left


def test_a_missing_package_is_named(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="gguf"):
        convert_gguf(write())


def test_a_config_beside_the_file_is_not_its_own(write, tmp_path):
    path = write()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 3}')
    assert load_config(ModelConfig(str(path))).num_hidden_layers == 2


@pytest.mark.slow
def test_commands_take_a_file_as_they_take_a_folder(write, model, original, tmp_path, capsys):
    path, folder = write(), tmp_path / "folder"
    model.save_pretrained(folder)
    original.save_pretrained(folder)
    (tmp_path / "a.txt").write_text(" ".join(TEXTS * 4))
    options = {"context_length": 16, "stride": 16, "alpha": 0.0, "beta": -8.0}
    expected, *others = (
        summarize(score(str(tmp_path / "a.txt"), model=str(one), evaluator=str(two), **options)).numbers()
        for one, two in ((folder, folder), (path, folder), (folder, path), (path, path))
    )
    assert expected["key_tokens"] > 0
    for found in others:
        assert {name: found[name] for name in ("longppl", "perplexity", "key_tokens")} == {
            name: pytest.approx(expected[name], rel=1e-6) for name in ("longppl", "perplexity", "key_tokens")
        }
    main(["export", str(path), str(tmp_path / "exported")])
    assert capsys.readouterr().out.endswith("exported\n")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(exported.lm_head.weight, model.lm_head.weight)
    with pytest.raises(SystemExit):
        main(["export", str(path), str(tmp_path / "again"), "--dtype", "bfloat16"])
    assert "is a GGUF file" in capsys.readouterr().err
