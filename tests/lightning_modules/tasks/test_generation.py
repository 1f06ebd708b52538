"""Continuations are those of a recomputation without a cache, whatever the model's own generation config says."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.models.loading.adapters import add_adapters
from lightning_modules.tasks import generation
from lightning_modules.tasks.generation import generate
from tests.conftest import tiny_config, tiny_model

LENGTHS, LIMITS = (3, 24, 13, 40, 13, 1), (5, 8, 9, 8, 7, 8)
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


def make_backbone(name="ours", dtype=torch.float64):
    kind, settings, attention = ARCHITECTURES[name]
    register_document_attention()
    torch.manual_seed(0)
    config = tiny_config(kind, max_position_embeddings=64, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return Backbone(model)


def recompute(model, prompt, limit):
    new = []
    for _ in range(limit):
        logits = model(torch.tensor([[*prompt, *new]]), use_cache=False).logits
        new.append(int(logits[0, -1].argmax()))
    return new


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_tokens_are_those_of_a_recomputation_without_a_cache(name, monkeypatch):
    monkeypatch.setattr(generation, "WINDOWED_CHUNK", 16)  # several for a long prompt
    backbone = make_backbone(name)
    found = generate(backbone, prompts(), LIMITS)
    assert found == [recompute(backbone.base_model, *each) for each in zip(prompts(), LIMITS, strict=True)]


@pytest.mark.parametrize("method", ["eabf", "streaming_llm", "longnet"])  # all: `patterns/test_models.py`
def test_extended_contexts_support_a_cache(method):
    options = {"longnet": {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}}.get(method, {})
    extension = ContextExtension(method=method, original_length=16, target_length=64, **options)
    config = tiny_config("llama", max_position_embeddings=16, num_hidden_layers=3, eos_token_id=None)
    extend_config(config, extension)
    torch.manual_seed(0)
    implementation = register_document_attention()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float64).eval()
    found = generate(Backbone(model), prompts(), LIMITS)
    assert found == [recompute(model, *each) for each in zip(prompts(), LIMITS, strict=True)]


def test_end_tokens_stop_a_continuation_and_are_not_part_of_it():
    backbone = make_backbone()
    whole = generate(backbone, prompts(), 8)
    ends = [whole[1][4], whole[3][2]]
    backbone.base_model.generation_config.eos_token_id = ends[0]
    found = generate(backbone, prompts(), 8, end_tokens=ends[1:])
    for tokens, cut in zip(whole, found, strict=True):
        places = [place for place, token in enumerate(tokens) if token in ends]
        assert cut == tokens[: min(places, default=8)]
    assert len(found[1]) < 8
    assert backbone.base_model.generation_config.eos_token_id == ends[0]


def test_options_of_the_model_change_no_answer():
    backbone = make_backbone()
    plain = generate(backbone, prompts(), 8)
    config = backbone.base_model.generation_config
    config.repetition_penalty, config.do_sample, config.temperature, config.num_beams = 5.0, True, 2.0, 3
    assert generate(backbone, prompts(), 8) == plain
    assert backbone.base_model.generation_config is config


def test_a_sampled_continuation_depends_on_seed_and_prompt_only():
    backbone = make_backbone()
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    torch.manual_seed(5)
    together = generate(backbone, prompts(), 8, options=options, seed=3)
    torch.manual_seed(6)
    assert [generate(backbone, [each], 8, options=options, seed=3)[0] for each in prompts()[::-1]] == together[::-1]
    assert generate(backbone, prompts(), 8, options=options, seed=4) != together
    assert generate(backbone, prompts(), 8) != together


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


class IgnoresCache(LlamaForCausalLM):
    """A model of code from elsewhere, which takes a cache and reads only the tokens that are new."""

    def forward(self, input_ids, *_, past_key_values=None, position_ids=None, attention_mask=None, **options):
        output = super().forward(input_ids, use_cache=False)
        output.past_key_values = past_key_values
        return output


def test_a_model_that_ignores_its_cache_is_continued_without_one(caplog):
    model = IgnoresCache(tiny_config("llama", max_position_embeddings=64, eos_token_id=None)).double().eval()
    found = generate(Backbone(model), prompts(), LIMITS)
    assert found == [recompute(model, *each) for each in zip(prompts(), LIMITS, strict=True)]
    generate(Backbone(model), prompts(), LIMITS)
    assert caplog.text.count("IgnoresCache") == 1


@pytest.mark.parametrize(
    ("name", "prompts", "message"),
    [
        ("ours", [[1], [400]], "400"),  # beyond the vocabulary
        ("gpt2", [[1] * 60], "64 learned positions"),
    ],
)
def test_invalid_prompts_are_refused(name, prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(make_backbone(name), prompts, 5)


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
    config = tiny_config(architecture, **{"max_position_embeddings": 16, "eos_token_id": None, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
    state = model.state_dict()

    def recompute_freshly(prompt, limit):
        new = []
        for _ in range(limit):
            fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
            fresh.load_state_dict(state)
            new += recompute(fresh, prompt + new, 1)
        return new

    backbone = Backbone(model)
    asked = [*zip(prompts(), LIMITS, strict=True), (prompts()[2][:8], 8), ([5] * 16, 1), ([6] * 16, 9)]
    expected = [recompute_freshly(*each) for each in asked]
    for order in (range(len(asked)), reversed(range(len(asked))), [3, 0, 1, 5, 2, 4]):
        order = list(order)
        found = generate(backbone, [asked[row][0] for row in order], [asked[row][1] for row in order])
        assert found == [expected[row] for row in order]
    lengths = []
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(backbone, [[5] * 4, [6] * 6], 6)
    assert lengths == [4, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1], "short texts are continued with a cache"
