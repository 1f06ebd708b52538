"""Patterns inside models: loaded, packed, padded, cached, trained, saved."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, StaticCache

from lightning_modules.batch import pack_sequence, with_scored
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.context_extension.patterns import PATTERNS, blocks
from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone, load_config
from lightning_modules.models.optimizations import enable_checkpointing
from lightning_modules.models.short_context import short_log_likelihood
from tests.conftest import tiny_model
from tests.lightning_modules.models.context_extension.patterns import dense
from tests.support.architectures import ROPE
from tests.support.packing import assume_isolation
from tests.support.tiny_training import row

VOCABULARY, ORIGINAL, TARGET, LENGTH = 50, 16, 64, 60
SETTINGS = {
    "streaming_llm": {"sinks": 2, "window": 9},
    "lm_infinite": {"sinks": 3},
    "rerope": {"window": 7},
    "self_extend": {"window": 5, "group": 6},
    "dual_chunk": {"chunk": 9},
    "longnet": {"segment_lengths": [8, 16, 48], "dilation_rates": [1, 2, 5]},
}


def extension(name, **options):
    return {"method": name, "original_length": ORIGINAL, "target_length": TARGET, **SETTINGS.get(name, {}), **options}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BLOCK", 13)
    monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 13)


@pytest.fixture
def folder(tmp_path):
    def save(architecture="llama", **overrides):
        settings = {"hidden_size": 64, "num_attention_heads": 4, **ROPE.get(architecture, {}), **overrides}
        tiny_model(architecture, VOCABULARY, **settings).save_pretrained(tmp_path / architecture)
        return str(tmp_path / architecture)

    return save


@torch.no_grad()
def check_every_layer(backbone, boundaries):
    seen = dense.record_layers(backbone, row(0, boundaries, VOCABULARY))
    assert len(seen) == 2
    for layer, hidden_states, actual in seen:
        rope = layer.config.rope_parameters
        expected = dense.layer_output(
            layer, hidden_states, boundaries, name=rope["rope_type"], theta=rope["rope_theta"]
        )
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("boundaries", [(0, LENGTH), (0, 7, 8, 40, LENGTH)], ids=["plain", "packed"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_every_layer_equals_the_formula(name, boundaries, architecture, folder):
    backbone = load_backbone(ModelConfig(folder(architecture), context_extension=extension(name)))
    check_every_layer(assume_isolation(backbone), boundaries)


@pytest.mark.parametrize("name", PATTERNS)
@torch.no_grad()
def test_packed_batched_and_windowed_documents_are_scored_as_each_alone(name, folder):
    backbone = load_backbone(ModelConfig(folder(), context_extension=extension(name))).eval()
    check_scoring(backbone)
    assert backbone.isolates_documents
    rows = [row(1, (0, 20, LENGTH), VOCABULARY), row(2, (0, 33, LENGTH), VOCABULARY)]
    both = {key: torch.cat([part[key] for part in rows]) for key in ("input_ids", "labels", "position_ids")}
    both["document_boundaries"] = [part["document_boundaries"][0] for part in rows]
    together = backbone(with_scored(both))
    alone = torch.zeros_like(together)
    for number, part in enumerate(rows):
        for start, stop in itertools.pairwise(part["document_boundaries"][0]):
            alone[number, start:stop] = backbone(document(part["input_ids"][0, start:stop]))[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    # Short windows of 24 to 36 tokens.
    batch = row(3, (0, LENGTH), VOCABULARY)
    short = short_log_likelihood(backbone, batch, ShortContext(24, 12))
    window = backbone(document(batch["input_ids"][0, 24:60]))
    torch.testing.assert_close(short.log_likelihood[0, 48:], window[0, 24:], rtol=1e-4, atol=1e-4)
    assert (short.log_likelihood - backbone(batch))[0, 48:].abs().max() > 1e-3


def document(tokens):
    return pack_sequence([tokens])


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "document_sdpa") for name in (*PATTERNS, "eabf")),
        *((name, "sdpa") for name in ("streaming_llm", "longnet", "eabf")),
    ],
)
def test_cached_generation_equals_full_recomputation(name, attention, folder):
    model = load_backbone(ModelConfig(folder(), context_extension=extension(name))).model.eval()
    model.set_attn_implementation(attention)
    tokens = row(2, (0, 30), VOCABULARY)["input_ids"].repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[1, :11] = 0  # left padding
    common = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    common |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    cached = model.generate(tokens, use_cache=True, **common)
    for number, padding in enumerate((0, 11)):
        text = cached.sequences[number : number + 1, padding:]
        with torch.no_grad():
            alone = model(text, use_cache=False).logits[0, 29 - padding : -1]
        torch.testing.assert_close(torch.stack(cached.logits)[:, number], alone, rtol=1e-4, atol=1e-3)
    if attention == "sdpa" and name != "eabf":
        static = model.generate(tokens, cache_implementation="static", **{**common, "disable_compile": True})
        assert torch.equal(static.sequences, cached.sequences)


@pytest.mark.parametrize("name", PATTERNS)
def test_gradient_checkpointing_and_gradients_in_bf16(name, folder):
    path, gradients = folder(initializer_range=0.1), {}  # not so wild that rounding is all
    for kind, dtype in ((False, "float32"), (True, "float32"), (True, "bfloat16")):
        backbone = load_backbone(
            ModelConfig(path, context_extension=extension(name), gradient_checkpointing=kind, dtype=dtype)
        )
        (-backbone.train()(row(3, (0, 20, LENGTH), VOCABULARY)).sum()).backward()
        gradients[kind, dtype] = torch.cat([p.grad.flatten().float() for p in backbone.parameters()])
    assert torch.equal(gradients[False, "float32"], gradients[True, "float32"])
    cosine = torch.cosine_similarity(gradients[True, "float32"], gradients[True, "bfloat16"], dim=0)
    assert cosine > 0.99
    with pytest.raises(ValueError, match=f"RoPE of type '{name}': set `gradient_checkpointing: true`"):
        enable_checkpointing(backbone.base_model, "selective")


def test_flash_attention_is_not_chosen_for_a_pattern(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    from lightning_modules.models.loading.load import choose_attention

    plain, pattern = (
        load_config(ModelConfig(folder(), context_extension=settings)) for settings in (None, extension("xpos"))
    )
    half = ModelConfig(dtype="bfloat16")
    assert choose_attention(half, plain, device="cuda") == "flash_attention_2"
    assert choose_attention(half, pattern, device="cuda") == "sdpa"


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("mistral", {"sliding_window": 32}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ],
)
def test_sliding_windows(architecture, settings, folder):
    path = folder(architecture, **settings)
    with pytest.raises(ValueError, match=r"sliding windows of 32 tokens.*full_attention: true"):
        load_config(ModelConfig(path, context_extension=extension("rerope")))
    backbone = load_backbone(ModelConfig(path, context_extension=extension("rerope", full_attention=True)))
    check_every_layer(backbone, (0, LENGTH))
    config = load_config(ModelConfig(path, context_extension=extension("rerope", full_attention=True)))
    config.sliding_window, config.layer_types = 32, ["sliding_attention"] * 2  # whoever does so all the same
    config.use_sliding_window = True
    model = AutoModelForCausalLM.from_config(config, attn_implementation="document_sdpa")
    with pytest.raises(ValueError, match="supports padding masks only"):
        model(torch.zeros(1, 40, dtype=torch.int64))


def restarting():
    return torch.cat([torch.arange(12), torch.arange(18)])[None]


@torch.no_grad()
def test_a_model_called_by_itself_gets_the_masks_of_transformers(folder):
    """Without boundaries `document_sdpa` is `sdpa`: documents stay apart, the empty end of a static cache is unseen."""
    tokens = row(5, (0, 30), VOCABULARY)["input_ids"]
    for settings in (None, extension("rerope")):
        model = load_backbone(ModelConfig(folder(), context_extension=settings)).model.eval()
        expected = model(tokens, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=40)
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([20, 1, 9], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="use `document_boundaries`"):
        model(tokens, position_ids=restarting(), use_cache=False)
    plain = load_backbone(ModelConfig(folder())).model.eval()
    apart = plain(tokens, position_ids=restarting(), use_cache=False).logits[:, 12:]
    torch.testing.assert_close(apart, plain(tokens[:, 12:], use_cache=False).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("sinks", {"rope_type": "streaming_llm", "window": 3}),
        ("window", {"rope_type": "rerope", "window": 0}),
        ("unscaled_layers", {"rope_type": "eabf", "original_max_position_embeddings": 16}),
        ("segment_lengths", {"rope_type": "longnet", "segment_lengths": [8, 12], "dilation_rates": [1, 2]}),
    ],
)
def test_parameters_that_a_config_lacks_or_has_wrong(name, rope, folder):
    config = load_config(ModelConfig(folder()))
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    register_rope_types()
    with pytest.raises(ValueError, match=name):
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
