"""Training with shifted sparse attention (LongLoRA), against dense attention under a mask in float64."""

import re

import pytest
import torch

from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.checks import check_attention_window
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.objectives import CrossEntropy, LongCE, Normalized, Rho1
from lightning_modules.training.preflight import check_sparse_attention
from tests.conftest import tiny_config, tiny_model
from tests.lightning_modules.test_training_step import FullRecorder
from tests.lightning_modules.training.test_skipped_positions import (
    EABF,
    GAMMA,
    D,
    K,
    dense_model,
    fit,
    skipping_batch,
    split,
)
from tests.support import reference
from tests.support.packing import VOCABULARY

GROUP = 10
CASES = {
    "llama": ("llama", {"gradient_checkpointing": True}),
    "selective": ("llama", {"gradient_checkpointing": "selective"}),
    "EABF": ("llama", {"context_extension": EABF}),
    "GPT-NeoX": ("gpt_neox", {}),
    "separate passes": ("llama", {}),
}


def visible_tokens(length, heads):
    """``[H, T, T]``: a token sees those before it in its group; groups are shifted in the second half of the heads."""
    visible = torch.zeros(heads, length, length, dtype=torch.bool)
    for head in range(heads):
        shift = 0 if head < heads // 2 else GROUP // 2
        for query in range(length):
            for key in range(query + 1):
                visible[head, query, key] = (query + shift) // GROUP == (key + shift) // GROUP
    return visible


@pytest.mark.parametrize("case", CASES)
def test_only_the_pass_with_gradient_is_sparse(case, tmp_path):
    architecture, settings = CASES[case]
    tiny_model(architecture, VOCABULARY, seed=2, num_hidden_layers=3).save_pretrained(tmp_path / "model")
    module = LongContextLM(
        str(tmp_path / "model"),
        objective=LongCE(GAMMA),
        context_length=K,
        stride=D,
        dtype="float64",
        shifted_sparse_attention=GROUP,
        optimizer=lambda parameters: FullRecorder(parameters, lr=1.0),
        **settings,
    )
    module.configure_model()
    dense = dense_model(module.backbone.base_model, with_eabf="context_extension" in settings)
    heads = dense.config.num_attention_heads
    batch = skipping_batch()
    gradients, loss = fit(module, batch, tmp_path)
    if case == "separate passes":
        module.backbone.isolates_documents = False
    with torch.no_grad():
        sparse = module.log_likelihood(batch)
        evaluated = module.backbone(batch)
    total, tokens = 0.0, 0
    for ids, positions, place in split(batch):
        visible = visible_tokens(len(ids), heads)
        with torch.no_grad():
            expected = reference.document_log_likelihood(dense, ids, positions, visible)
            full = reference.document_log_likelihood(dense, ids, positions)
        torch.testing.assert_close(sparse[place], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(evaluated[place], full, rtol=1e-6, atol=1e-6)
        assert (expected - full).abs().max() > 0.1
        count = len(ids) - 1
        total = total + count * reference.longce(dense, ids, K, D, GAMMA, positions, visible)
        tokens += count
    total = total / tokens
    assert loss == pytest.approx(total.item(), rel=1e-6)
    total.backward()
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


class Likely(CrossEntropy):
    def token_weights(self, long, short, batch):
        return (long > -5).float()


@pytest.mark.parametrize("objective", [Rho1(), Likely()])
def test_weights_of_the_scores_alone_are_those_of_full_attention(objective, tmp_path):
    tiny_model("llama", VOCABULARY, seed=2).save_pretrained(tmp_path / "model")
    module = LongContextLM(
        str(tmp_path / "model"),
        objective=objective,
        dtype="float64",
        shifted_sparse_attention=GROUP,
        optimizer=lambda parameters: FullRecorder(parameters, lr=1.0),
    )
    module.configure_model()
    seen = []
    module.token_observers.append(lambda scores, *_: seen.append(scores))
    batch = skipping_batch()
    expected = module.full_log_likelihood(batch, objective)
    assert (expected - module.log_likelihood(batch)).abs().max() > 0.1
    if objective.uses_stored:
        batch = {**batch, "influence": torch.zeros(batch["labels"].shape)}
    fit(module, batch, tmp_path)
    torch.testing.assert_close(seen[0], expected)
    assert module.full_log_likelihood(batch, Normalized(CrossEntropy())) is None, "its weights need no scores"


def test_a_model_that_ignores_groups_is_refused(tmp_path):
    module = LongContextLM(config_of(tmp_path), attn_implementation="eager")
    module.configure_model()
    with pytest.raises(ValueError, match="`shifted_sparse_attention` does not support `LlamaForCausalLM` with 'eager'"):
        check_attention_window(module.backbone, groups=True)


def config_of(folder):
    tiny_config().save_pretrained(folder)
    return str(folder / "config.json")


@pytest.mark.parametrize(
    ("settings", "loading", "processes", "named"),
    [
        ({}, {"shifted_sparse_attention": 128}, 1, "= 128 must be below `data.sequence_length` = 128"),
        ({"num_key_value_heads": 1}, {}, 1, "even number of key-value heads, of which half are shifted, got 1"),
        ({}, {}, 2, "does not support `sequence_parallel_size` = 2"),
        ({}, {"attn_implementation": "eager"}, 1, "`model.attn_implementation: sdpa`"),
        ({"architecture": "mistral", "sliding_window": 64}, {}, 1, "sliding window of 64"),
        ({"rope_parameters": {"rope_type": "rerope", "rope_theta": 1e4}}, {}, 1, "'rerope'"),
    ],
)
def test_settings_that_are_refused(settings, loading, processes, named):
    loading = ModelConfig("x", **{"shifted_sparse_attention": 32} | loading)
    with pytest.raises(ValueError, match=re.escape(named)):
        check_sparse_attention(tiny_config(**settings), loading, 128, processes)


@pytest.mark.parametrize("group", [0, 7, -2])
def test_groups_have_two_halves(group):
    with pytest.raises(ValueError, match=f"an even number of 2 or more.* got {group}"):
        ModelConfig("x", shifted_sparse_attention=group)
