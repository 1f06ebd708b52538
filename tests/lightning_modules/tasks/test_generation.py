"""Greedy continuations are those of transformers, prompt by prompt."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.methods import ContextExtension, extend_config
from lightning_modules.models.context_extension.patterns import PATTERNS
from lightning_modules.models.loading.adapters import add_adapters
from lightning_modules.tasks import generation
from lightning_modules.tasks.generation import cache_use, generate
from tests.conftest import tiny_config, tiny_model

LENGTHS, LIMITS = (3, 24, 13, 40, 13, 1), (5, 8, 9, 8, 7, 8)
ENDS = [1, 2, 3, 5, 7, 11, 13, 17]
WINDOW = {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}
ARCHITECTURES = {
    "llama": ("llama", {}, "sdpa"),
    "ours": ("llama", {}, "document_sdpa"),
    "qwen2": ("qwen2", {}, "sdpa"),
    "mistral": ("mistral", {"sliding_window": 8}, "document_sdpa"),
    "gemma2": ("gemma2", {**WINDOW, "final_logit_softcapping": 3.0}, "eager"),
    "gemma3": ("gemma3_text", {**WINDOW, "final_logit_softcapping": 3.0}, "document_sdpa"),
    "gpt_neox": ("gpt_neox", {}, "sdpa"),
    "gpt2": ("gpt2", {}, "sdpa"),
    "granite": ("granite", {"logits_scaling": 4.0}, "sdpa"),
}


def prompts(count=6, vocabulary=400):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS[:count]]


def make_backbone(name="ours", dtype=torch.float64, ends=ENDS):
    kind, settings, attention = ARCHITECTURES[name]
    register_document_attention()
    torch.manual_seed(0)
    config = tiny_config(kind, max_position_embeddings=64, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = ends
    return Backbone(model)


def by_transformers(backbone, prompt, limit):
    tokens = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": limit, "pad_token_id": 0}
    whole = backbone.base_model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
    return [token for token in whole[0, len(prompt) :].tolist() if token not in ENDS]


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_groups_match_single_prompts_and_transformers(name, monkeypatch):
    monkeypatch.setattr(generation, "WINDOWED_CHUNK", 16)  # several for a long prompt
    backbone = make_backbone(name)
    together = generate(backbone, prompts(), LIMITS)
    assert cache_use(backbone) == "together"
    assert together == [generate(backbone, [prompt], limit)[0] for prompt, limit in zip(prompts(), LIMITS, strict=True)]
    assert together == [by_transformers(backbone, *pair) for pair in zip(prompts(), LIMITS, strict=True)]
    lengths = {len(tokens) for tokens in together}
    assert max(lengths) == 9


def test_an_end_token_stops_a_continuation():
    whole = generate(make_backbone(ends=[]), prompts(), 8)
    end = whole[1][4]
    cut = generate(make_backbone(ends=[end]), prompts(), 8)
    assert cut == [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
    assert len(cut[1]) < 8


def test_every_logit_matches_a_pass_over_all_tokens(monkeypatch):
    """Not just the likeliest one: with windows, of rows that are padded, far beyond the window."""
    monkeypatch.setattr(generation, "WINDOWED_CHUNK", 16)
    backbone = make_backbone("gemma3", ends=[])
    logits = []
    next_logits = generation.next_logits
    monkeypatch.setattr(generation, "next_logits", lambda *a: logits.append(next_logits(*a)) or logits[-1])
    order = sorted(range(6), key=lambda row: -LENGTHS[row])
    new = generate(backbone, prompts(), 8)
    seen = torch.stack(logits[-7:], dim=1)
    for place, row in enumerate(order):
        tokens = torch.tensor([prompts()[row] + new[row]])
        expected = backbone.base_model(tokens, use_cache=False).logits[0, LENGTHS[row] : -1]
        torch.testing.assert_close(seen[place], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["eabf", "yarn", *PATTERNS])
def test_extended_contexts_support_a_cache(method):
    options = {"longnet": {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}}.get(method, {})
    extension = ContextExtension(method=method, original_length=16, target_length=64, **options)
    config = tiny_config("llama", max_position_embeddings=16, num_hidden_layers=3)
    extend_config(config, extension)
    torch.manual_seed(0)
    implementation = register_document_attention()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float64)
    backbone = Backbone(model.eval())
    together = generate(backbone, prompts(), LIMITS)
    backbone.cache_use = "none"
    assert together == generate(backbone, prompts(), LIMITS)


@pytest.mark.parametrize("use", ["alone", "none"])
def test_results_do_not_depend_on_cache_use(use):
    backbone = make_backbone("qwen2")
    together = generate(backbone, prompts(), LIMITS)
    backbone.cache_use = use
    assert generate(backbone, prompts(), LIMITS) == together


def test_models_without_padding_or_cache_support_are_detected(monkeypatch, caplog):
    backbone = make_backbone("llama")
    decoder, forward = backbone.decoder, backbone.decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *a, **k: forward(*a, **{**k, "attention_mask": None}))
    assert cache_use(backbone) == "alone"
    assert not caplog.text
    backbone.cache_use = None
    monkeypatch.setattr(decoder, "forward", lambda *a, **k: forward(*a, **{**k, "past_key_values": None}))
    assert cache_use(backbone) == "none"
    assert "does not support a key-value cache" in caplog.text


def test_less_memory_gives_smaller_groups_and_the_same_tokens(monkeypatch):
    backbone, groups = make_backbone(), []
    whole = generate(backbone, prompts(), LIMITS)
    per_token = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, width, bytes
    monkeypatch.setattr(generation, "CACHE_BYTES", 100 * per_token)
    assert generate(backbone, prompts(), LIMITS, done=groups.append) == whole
    assert [[LENGTHS[row] for row in group] for group in groups] == [[13, 40], [24, 1, 13], [3]]


def test_adapters_are_used_and_training_state_is_restored():
    model = tiny_model("llama", dtype=torch.float64)
    plain = generate(Backbone(model), prompts(), 8)
    model = add_adapters(model, {"r": 4, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.5})
    backbone = Backbone(model).train()
    for name, parameter in backbone.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    state, modes = torch.get_rng_state(), [module.training for module in backbone.modules()]
    adapted = generate(backbone, prompts(), 8)
    assert adapted != plain
    assert adapted == generate(backbone, prompts(), 8)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in backbone.modules()]
    assert all(parameter.grad is None for parameter in backbone.parameters())


@pytest.mark.parametrize(
    ("name", "prompts", "message"),
    [
        ("ours", [[1], [400]], "400"),  # beyond the vocabulary
        ("gpt2", [[1] * 60], "64 learned positions"),
    ],
)
@pytest.mark.parametrize("use", [None, "none"])
def test_invalid_prompts_are_refused(name, prompts, message, use):
    backbone = make_backbone(name)
    backbone.cache_use = use
    with pytest.raises(ValueError, match=message):
        generate(backbone, prompts, 5)


def test_a_repetition_penalty_of_the_model_changes_no_greedy_answer():
    """`transformers.generate` would apply it."""
    backbone = make_backbone(ends=[])
    plain = generate(backbone, prompts(), 8)
    backbone.base_model.generation_config.repetition_penalty = 5.0
    assert generate(backbone, prompts(), 8) == plain
    assert by_transformers(backbone, prompts()[1], 8) != plain[1]


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "factor": 4.0,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A document of .* tokens is longer")
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}}),
        ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 64}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": 100}),
    ],
    ids=["dynamic", "longrope", "phi3"],
)
def test_rope_that_depends_on_the_length_gives_each_prompt_its_own_answer(architecture, settings, monkeypatch):
    """Below, at and beyond the original length, in several orders, against plain logits of a new model."""
    monkeypatch.setattr(generation, "WINDOWED_CHUNK", 8)
    config = tiny_config(architecture, **{"max_position_embeddings": 16, **settings})
    state, passes = None, []

    def make():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
        model.generation_config.eos_token_id = None
        model.config.eos_token_id = None
        return model

    def recompute(prompt, limit):
        new = []
        for _ in range(limit):
            fresh = make()
            fresh.load_state_dict(state)
            new.append(int(fresh(torch.tensor([prompt + new]), use_cache=False).logits[0, -1].argmax()))
        return new

    model = make()
    state = model.state_dict()
    backbone = Backbone(model)
    asked = [*zip(prompts(), LIMITS, strict=True), (prompts()[2][:8], 8), ([5] * 16, 1), ([6] * 16, 9)]
    expected = [recompute(*each) for each in asked]
    model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    for order in (range(len(asked)), reversed(range(len(asked))), [3, 0, 1, 5, 2, 4]):
        order = list(order)
        found = generate(backbone, [asked[row][0] for row in order], [asked[row][1] for row in order])
        assert found == [expected[row] for row in order]
    passes.clear()
    generate(backbone, [[5] * 4, [6] * 6, [7] * 3], 6)
    assert len(passes) == 3 + 5, "short texts are continued together, with a cache"
