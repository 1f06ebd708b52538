import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, Llama4Config, Llama4ForConditionalGeneration

from lightning_modules.functional import key_token_mask, linear_head
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models import backbone as backbone_module
from lightning_modules.models import short_context
from lightning_modules.models.attention import isolation_arguments, register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.checks import check_scoring, has_training_noise
from lightning_modules.models.short_context import long_and_short, short_log_likelihood
from tests.conftest import tiny_config
from tests.support import architectures, reference
from tests.support.packing import VOCABULARY, assume_isolation, build, documents, packed

LLAMA4 = {
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,  # the last one without rotation
    "num_local_experts": 2,
    "attention_chunk_size": 9,  # shorter than documents
    "floor_scale": 4,
}
FALCON_H1 = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "lm_head_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.5, 2.0],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "key_multiplier": 0.7,
}
# Logit scale, soft cap, division, bias; tied weights; sliding windows and chunks; states. The slow tier has all others.
ARCHITECTURES = [
    ("llama4_text", LLAMA4),
    ("llama4_text", {**LLAMA4, "attention_chunk_size": 30, "floor_scale": 40}),  # longer than rows
    ("falcon_h1", FALCON_H1),
    ("llama", {}),
    ("mistral", {"sliding_window": 9}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("phi", {"partial_rotary_factor": 0.5}),
    ("cohere", {"logit_scale": 0.25}),
    ("granite", {"logits_scaling": 3.0}),
    ("gemma2", {"attention": "eager", "final_logit_softcapping": 2.0, "head_dim": 8}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 9}),
]


@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES)
def test_packed_documents_score_as_if_alone(architecture, overrides):
    model = build(architecture, **overrides)
    rows = [documents(11, 1, 14), documents(20), documents(2, 7, seed=1)]
    batch = packed(*rows)
    scorer = Backbone(model)
    check_scoring(scorer)
    with torch.no_grad():
        actual = scorer(batch)
        for index, row in enumerate(rows):
            alone = torch.cat([reference.document_log_likelihood(model, document) for document in row])
            torch.testing.assert_close(actual[index, : len(alone)].double(), alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_states_are_known_of_the_architecture_where_the_probe_is_too_coarse(spread, dtype):
    """Small weights or half precision hide that a state runs on into the next document."""
    scorer = Backbone(build("falcon_h1", **{**FALCON_H1, "initializer_range": spread}).to(dtype))
    parts = documents(31, 25, 13)
    for probed in (False, True):
        if probed:
            check_scoring(scorer)
        assert not scorer.isolates_documents
        with torch.no_grad():
            alone = torch.cat([scorer(packed([part]))[0] for part in parts])
            assert torch.equal(scorer(packed(parts))[0], alone)


def log_likelihood_and_gradients(scorer, batch):
    scorer.zero_grad()
    scored = scorer(batch)
    scored.sum().backward()
    return scored.detach(), [parameter.grad.clone() for parameter in scorer.parameters()]


@pytest.mark.parametrize(
    ("attention", "training", "batch_size", "checkpointing"),  # all pairs
    [
        ("document_sdpa", True, 1, True),
        ("document_sdpa", False, 4, False),
        ("sdpa", True, 4, False),
        ("sdpa", False, 1, True),
        ("eager", True, 4, True),
        ("eager", False, 1, False),
    ],
)
def test_packed_equals_separate_in_every_mode(attention, training, batch_size, checkpointing):
    """Rows as `best_fit` makes them: of several documents, some with padding behind the last border."""
    scorer = assume_isolation(Backbone(build("llama", attention).train(training)))
    if checkpointing:
        scorer.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    assert scorer.model.config.use_cache  # the default, which would let documents see each other
    rows = [documents(9, 1, 14), documents(17, 7, seed=1), documents(20, seed=2), documents(2, 3, 5, 10, seed=3)]
    packed_ll, packed_gradients = log_likelihood_and_gradients(scorer, packed(*rows[:batch_size], length=25))
    gradients = [torch.zeros_like(gradient) for gradient in packed_gradients]
    for row, scored in zip(rows, packed_ll, strict=False):
        alone = [log_likelihood_and_gradients(scorer, packed([document])) for document in row]
        expected = torch.cat([log_likelihood[0] for log_likelihood, _ in alone])
        torch.testing.assert_close(scored[: len(expected)], expected, atol=1e-5, rtol=0)
        assert (scored[len(expected) :] == 0).all()
        for total, *parts in zip(gradients, *(each for _, each in alone), strict=True):
            total += sum(parts)
    for actual, expected in zip(packed_gradients, gradients, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("context_length", "stride"), [(6, 3), (4, 9), (8, 8)])
@pytest.mark.parametrize("windows_together", [True, False])
def test_long_and_short_match_one_window_at_a_time(context_length, stride, windows_together, monkeypatch):
    if windows_together:  # as on an accelerator
        monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 5)
    model = build("llama")
    rows = [documents(30, 8, 17), documents(40)]
    long, short = long_and_short(assume_isolation(Backbone(model)), packed(*rows), ShortContext(context_length, stride))
    with torch.no_grad():
        for index, row in enumerate(rows):
            pairs = [reference.long_and_short(model, document, context_length, stride) for document in row]
            for actual, expected in zip((long, short), zip(*pairs, strict=True), strict=True):
                expected = torch.cat(expected)
                torch.testing.assert_close(actual[index, : len(expected)].double(), expected, atol=2e-5, rtol=1e-4)
    assert (long != short).any()


@pytest.mark.parametrize("beta", [-4.0, -5.5, -99.0, 0.0])
def test_tokens_that_cannot_be_key_are_spared(beta, monkeypatch):
    scorer = assume_isolation(Backbone(build("llama")))
    batch = packed(documents(60, 8, 30), documents(70))
    long, short = long_and_short(scorer, batch, ShortContext(6, 3))
    scored = []
    original = short_context.window_batch
    monkeypatch.setattr(
        short_context, "window_batch", lambda *a: scored.append(int((w := original(*a))["labels"].ge(0).sum())) or w
    )
    same, some = long_and_short(scorer, batch, ShortContext(6, 3), beta=beta)
    torch.testing.assert_close(same, long)
    spared = (long <= beta) & (batch["position_ids"] >= 9)
    assert torch.equal(some.isnan(), spared)
    torch.testing.assert_close(some[~spared], short[~spared])
    assert sum(scored) == int(((long > beta) & (batch["position_ids"] >= 9) & batch["labels"].ge(0)).sum())
    for alpha in (0.0, 0.5, 2.0):
        if beta < 0:
            masks = [key_token_mask(*pair, alpha=alpha, beta=beta) for pair in ((long, short), (same, some))]
            assert torch.equal(*masks)


def test_windows_share_a_pass_where_it_is_faster():
    backbone = assume_isolation(Backbone(build("llama")))
    assert [backbone.windows_per_pass(length) for length in (80, 160, 1281, 5120)] == [16, 8, 1, 1]
    accelerated = backbone.to("meta")
    assert accelerated.windows_per_pass(5120) == 6
    assert accelerated.windows_per_pass(40_000) == 1


def test_windows_of_similar_length_share_passes_of_nearly_the_same_size(monkeypatch):
    scorer = assume_isolation(Backbone(build("llama").double()))
    # 19 windows of 9 tokens, and between them 7 cut ones of 7 tokens at the ends of the documents.
    batch = packed(documents(10, 19, 10, 19, 10, 19), documents(40))
    monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 1)
    alone, _ = short_log_likelihood(scorer, batch, ShortContext(6, 3))
    shapes = []
    original = short_context.window_batch

    def window_batch(*arguments):
        passed = original(*arguments)
        shapes.append(tuple(passed["input_ids"].shape))
        return passed

    monkeypatch.setattr(short_context, "window_batch", window_batch)
    monkeypatch.setattr(Backbone, "windows_per_pass", lambda *_: 8)
    together, _ = short_log_likelihood(scorer, batch, ShortContext(6, 3))
    assert shapes == [(6, 9), (7, 9), (6, 9), (7, 7)]
    torch.testing.assert_close(together, alone)


def test_short_pass_leaves_modes_and_gradients_alone():
    scorer = assume_isolation(Backbone(build("llama", attention_dropout=0.5).train()))
    scorer.model.model.layers[0].eval()
    batch = packed(documents(40))
    first, *_ = short_log_likelihood(scorer, batch, ShortContext(6, 3))
    again, differs = short_log_likelihood(scorer, batch, ShortContext(6, 3))
    torch.testing.assert_close(first, again, msg="dropout was on")
    assert not first.requires_grad
    assert differs[0].tolist() == [t >= 9 for t in range(40)]
    assert scorer.model.model.layers[1].training
    assert not scorer.model.model.layers[0].training


def test_autocast_weights_cached_by_the_short_pass_do_not_rob_the_long_pass_of_gradients():
    scorer = assume_isolation(Backbone(build("llama").train()))
    batch = packed(documents(40))
    gradients = []
    for with_short_pass in (False, True):
        scorer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            if with_short_pass:
                short_log_likelihood(scorer, batch, ShortContext(6, 3))
            scorer(batch).sum().backward()
        gradients.append({name: p.grad for name, p in scorer.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradients[1][name] is not None, name
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_model_that_our_attention_cannot_split_gets_masks(monkeypatch):
    scorer = assume_isolation(Backbone(build("llama")))
    original = backbone_module.isolation_arguments

    def lost(implementation, *rest):
        return {} if implementation == "document_sdpa" else original(implementation, *rest)

    monkeypatch.setattr(backbone_module, "isolation_arguments", lost)
    batch = packed(documents(9, 12))
    with torch.no_grad():
        leaking = scorer(batch)
        check_scoring(scorer)
        masked = scorer(batch)
    assert scorer.base_model.config._attn_implementation == "sdpa"
    expected = torch.cat([reference.document_log_likelihood(scorer.model, part) for part in documents(9, 12)])
    torch.testing.assert_close(masked[0].double(), expected, atol=2e-5, rtol=1e-4)
    assert (leaking - masked).abs().max() > 0.01


def test_a_model_that_leaks_scores_documents_one_by_one_or_not_at_all_where_weights_are_shared(monkeypatch):
    scorer = assume_isolation(Backbone(build("llama")))
    with torch.no_grad():
        expected = scorer(packed(documents(9, 12), documents(20, seed=1)))
    decoder = scorer.base_model.get_decoder()
    forward = decoder.forward

    def without_borders(input_ids, attention_mask=None, document_boundaries=None, **kwargs):
        return forward(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)

    monkeypatch.setattr(decoder, "forward", without_borders)
    check_scoring(scorer)
    with torch.no_grad():
        actual = scorer(packed(documents(9, 12), documents(20, seed=1)))
        torch.testing.assert_close(actual, expected)
    scorer.is_sharded = True
    scorer(packed(documents(9)))
    with pytest.raises(ValueError, match="cannot isolate the documents of a sequence"):
        scorer(packed(documents(9, 12)))


@pytest.mark.parametrize(
    ("architecture", "settings", "attention", "dtype"),
    [
        ("afmoe", {}, "sdpa", torch.float32),  # makes the masks of its windows without positions
        ("gpt_oss", {}, "eager", torch.float32),
        ("openai-gpt", {}, "eager", torch.bfloat16),  # whose rounding is as large as what leaks
        ("doge", {}, "document_sdpa", torch.bfloat16),
        ("lfm2", {"initializer_range": 0.02}, "sdpa", torch.float32),  # its scores hardly change
        ("marian", {}, "sdpa", "autocast"),  # which would round the leak away
        ("pegasus", {}, "sdpa", "autocast"),
    ],
)
def test_documents_that_leak_are_found_by_each_check(architecture, settings, attention, dtype):
    autocast = dtype == "autocast"
    scorer = load(architecture, attention, torch.float32 if autocast else dtype, **settings)
    parts = documents(31, 23)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            check_scoring(scorer)
        assert not scorer.isolates_documents
        scorer.checked_conditions = None  # decide again
        with torch.no_grad():
            alone = torch.cat([scorer(packed([part]))[0] for part in parts])
            assert torch.equal(scorer(packed(parts))[0], alone)
    scorer.is_sharded = True
    check_scoring(scorer)
    with pytest.raises(ValueError, match="cannot isolate the documents of a sequence"):
        scorer(packed(parts))


def load(architecture, attention="sdpa", dtype=torch.float32, **settings):
    torch.manual_seed(0)
    config = architectures.tiny_config(architecture, **settings)
    return Backbone(AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval())


def test_a_document_is_rotated_by_its_own_length_and_not_by_the_longest_of_its_pass():
    """LongRoPE has other frequencies from 17 tokens on here."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 32.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    register_document_attention()
    scorer = load("phi3", "document_sdpa", rope_parameters=rope, original_max_position_embeddings=16)
    check_scoring(scorer)
    parts = documents(31, 10, 23)
    with torch.no_grad():
        alone = torch.cat([scorer(packed([part]))[0] for part in parts])
        torch.testing.assert_close(scorer(packed(parts))[0], alone, rtol=0, atol=1e-4)
        rows = scorer(packed(*[[part] for part in parts]))
    rows = torch.cat([row[: len(part)] for row, part in zip(rows, parts, strict=True)])
    torch.testing.assert_close(rows, alone, rtol=0, atol=1e-4)


def test_a_decision_is_made_once_for_a_device_and_a_precision(monkeypatch):
    scorer = Backbone(build("llama"))
    passes = []
    scorer.register_forward_hook(lambda *_: passes.append(1))
    check_scoring(scorer)
    first = len(passes)
    check_scoring(scorer)
    assert len(passes) == first > 0
    with torch.autocast("cpu", torch.bfloat16):
        check_scoring(scorer)
    assert len(passes) > first


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_positions": 32}, False),
        ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.1}, True),
        ("phimoe", {}, True),
        ("phimoe", {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, False),
        ("mixtral", {}, False),
        ("mixtral", {"router_jitter_noise": 0.1}, True),
    ],
)
def test_noise_of_training_mode_is_found(architecture, settings, expected):
    scorer = load(architecture, **settings).train()
    state = torch.get_rng_state()
    assert has_training_noise(scorer) is expected
    assert torch.equal(torch.get_rng_state(), state), "or a resumed run would draw other numbers"


def test_long_rows_of_llama_4_are_windowed_and_trained_as_documents_alone():
    """Attention counts from the start of the row: in chunks, and in what queries are scaled by."""
    model = build("llama4_text", **LLAMA4)
    assert model.config.layer_types.count("full_attention") not in (0, len(model.config.layer_types))
    scorer = Backbone(model)
    check_scoring(scorer)
    parts = documents(31, 25)
    whole, *alone = (packed(rows) for rows in (parts, parts[:1], parts[1:]))
    for score in (
        scorer,
        lambda batch: short_log_likelihood(scorer, batch, ShortContext(10, 5)).log_likelihood,
    ):
        expected = torch.cat([score(batch)[0] for batch in alone])
        torch.testing.assert_close(score(whole)[0], expected, atol=2e-5, rtol=1e-4)
        assert expected.abs().sum() > 0
    short = short_log_likelihood(scorer, alone[0], ShortContext(10, 5)).log_likelihood[0]
    window = reference.document_log_likelihood(model, parts[0][5:20])  # scores tokens 15 to 19
    torch.testing.assert_close(short[15:20].double(), window[10:15], atol=2e-5, rtol=1e-4)


def test_the_language_model_in_a_multimodal_llama_4():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**sizes, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    text = tiny_config("llama4_text", VOCABULARY, **LLAMA4).to_dict()
    config = Llama4Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    scorer = Backbone(Llama4ForConditionalGeneration._from_config(config, dtype=torch.float32).eval())
    assert type(scorer.decoder).__name__ == "Llama4TextModel"
    check_scoring(scorer)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_rotary_frequencies_survive_casts(architecture):
    scorer = Backbone(build(architecture, head_dim=8))
    before = {name: b.clone() for name, b in scorer.named_buffers() if name.endswith("inv_freq")}
    assert before
    torch.nn.ModuleList([scorer]).to(torch.bfloat16)
    assert next(scorer.parameters()).dtype == torch.bfloat16
    for name, buffer in scorer.named_buffers():
        if name in before:
            assert torch.equal(buffer, before[name])
    check_rotary(scorer.base_model)
    scorer.model.to(torch.bfloat16)  # past our guard
    with pytest.raises(RuntimeError, match="inv_freq"):
        check_rotary(scorer.base_model)


def test_too_long_documents():
    batch = packed(documents(30))
    with pytest.warns(UserWarning, match=r"30 tokens is longer than the 16"):
        Backbone(build("llama", max_position_embeddings=16))(batch)
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=VOCABULARY)
    scorer = Backbone(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    with pytest.raises(ValueError, match="16 learned positions"):
        scorer(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer(packed(documents(16)))


def test_flash_arguments_are_cumulative_lengths_over_all_rows():
    arguments = isolation_arguments("flash_attention_2", [[0, 4, 9], [0, 10]], 10, torch.device("cpu"))
    assert arguments["cu_seq_lens_q"].tolist() == [0, 4, 9, 10, 20]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_q"] == arguments["max_length_k"] == 10
    padded = isolation_arguments("flash_attention_2", [[0, 10], [0, 7]], 10, torch.device("cpu"))
    assert padded["cu_seq_lens_k"].tolist() == [0, 10, 17, 20], "single documents as well, or each layer would wait"
    shards = isolation_arguments("flash_attention_2", [[0, 4, 10], [0, 10]], 5, torch.device("cpu"))
    assert shards["cu_seq_lens_q"].tolist() == [0, 4, 10, 20], "of whole sequences, which processes share"
    assert isolation_arguments("document_sdpa", [[0, 10], [0, 7]], 10, torch.device("cpu")) == {}
    assert isolation_arguments("eager", [[0, 4, 9]], 10, torch.device("cpu")) == {}


@pytest.mark.parametrize("change", [{"final_logit_softcapping": 30.0}, {"logits_scaling": 1.1}])
def test_a_forgotten_transform_is_noticed_in_half_precision_too(change):
    model = build("llama").to(torch.bfloat16)
    check_scoring(Backbone(model))
    for name, value in change.items():  # ours applies what the model does not know
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match="standard deviations"):
        check_scoring(Backbone(model))


def capped():
    return build("gemma2", attention="eager", final_logit_softcapping=2.0, head_dim=8)


def lora_on_the_head():
    return get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj", "lm_head"]))


@pytest.mark.parametrize("make", [lambda: build("llama"), lora_on_the_head, capped], ids=["linear", "LoRA", "capped"])
@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("precision", ["true", "mixed"])
def test_half_precision_rounds_the_same_with_and_without_gradient(make, widens, precision, monkeypatch):
    """Or the long-short difference of each token would be noise."""
    if widens:  # as on a GPU
        monkeypatch.setattr(linear_head, "_multiplies_into_float32", lambda operand: operand.dtype == torch.bfloat16)
        monkeypatch.setattr(linear_head, "_multiply_into_float32", lambda left, right: left.float() @ right.float())
    scorer = assume_isolation(Backbone(make().eval()))
    scorer = scorer.bfloat16() if precision == "true" else scorer
    batch = packed(documents(30, 8), documents(40))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed"):
        with_gradient = scorer(batch)
        with torch.no_grad():
            without = scorer(batch)
    assert with_gradient.requires_grad
    assert torch.equal(with_gradient, without)
