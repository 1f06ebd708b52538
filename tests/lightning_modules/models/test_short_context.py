"""Short contexts by one pass with a limited attention, against masks and against exact windows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, masking_utils

from lightning_modules.batch import IGNORE_INDEX, pack_sequence
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.attention import (
    document_mask,
    documents_by_boundaries,
    register_document_attention,
)
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.models.loading.checks import check_attention_window
from lightning_modules.models.short_context import short_log_likelihood, sliding_window_log_likelihood
from tests.support.packing import assume_isolation

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}


def backbone(config=LlamaConfig, model=LlamaForCausalLM, layers=3, **settings):
    register_rope_types()
    torch.manual_seed(0)
    made = model(config(**{**SIZES, "num_hidden_layers": layers, **settings})).eval()
    made.set_attn_implementation(register_document_attention())
    return assume_isolation(Backbone(made))


def documents(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


def masked(model, ids, window):
    """Return ``[n]`` float64 log-likelihoods of a document by the model's eager attention with a mask."""
    index = torch.arange(len(ids))
    visible = (index[:, None] >= index) & (index[:, None] - index < window)
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    logits = model(input_ids=ids[None], attention_mask=mask[None, None], use_cache=False).logits[0, :-1]
    scores = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return torch.cat([scores.new_zeros(1), scores])


@pytest.mark.parametrize(
    ("settings", "window", "own"),
    [
        ({}, 16, 999),
        ({}, 1, 999),
        ({}, 70, 999),
        ({}, 200, 999),
        ({"config": MistralConfig, "model": MistralForCausalLM, "sliding_window": 40}, 16, 40),
        ({"config": MistralConfig, "model": MistralForCausalLM, "sliding_window": 40}, 90, 40),
    ],
)
@torch.no_grad()
def test_a_limited_attention_is_that_of_a_mask_in_packed_documents(settings, window, own):
    model = backbone(**settings)
    texts = documents(150, 40, 3)
    batch = pack_sequence(texts)
    actual = sliding_window_log_likelihood(model, batch, context_length=window)
    alone = [sliding_window_log_likelihood(model, pack_sequence([text]), context_length=window) for text in texts]
    model.base_model.set_attn_implementation("eager")
    model.double()
    expected = torch.cat([masked(model.base_model, text, min(window, own)) for text in texts])
    scored = batch["labels"][0] != IGNORE_INDEX
    assert torch.allclose(actual.log_likelihood[0, scored].double(), expected[scored], atol=2e-5)
    torch.testing.assert_close(torch.cat([each.log_likelihood for each in alone], 1), actual.log_likelihood)
    assert actual.has_short_context.tolist() == (scored & (batch["position_ids"] > window)).tolist()


EABF = {"rope_type": "eabf", "rope_theta": 1000.0, "original_max_position_embeddings": 6, "unscaled_layers": 0}


@pytest.mark.parametrize("settings", [{}, {"rope_parameters": EABF}])
def test_in_one_layer_it_is_the_exact_short_context_of_k_tokens(settings):
    model, batch = backbone(layers=1, **settings), pack_sequence(documents(60, 30))
    exact = short_log_likelihood(model, batch, ShortContext(12, 1))
    sliding = sliding_window_log_likelihood(model, batch, context_length=12)
    both = exact.has_short_context
    assert both.any()
    assert torch.equal(both, sliding.has_short_context)
    torch.testing.assert_close(sliding.log_likelihood[both], exact.log_likelihood[both], rtol=0, atol=2e-5)


def test_adapters_are_part_of_it_and_it_leaves_mode_and_gradients_alone():
    model, batch = backbone(), pack_sequence(documents(60))
    plain = sliding_window_log_likelihood(model, batch, context_length=12).log_likelihood
    adapted = get_peft_model(model.base_model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    trained = assume_isolation(Backbone(adapted)).train()
    scores = sliding_window_log_likelihood(trained, batch, context_length=12).log_likelihood
    assert trained.training
    assert not scores.requires_grad
    assert (scores - plain).abs().max() > 0.01


def test_a_model_that_ignores_the_window_is_refused():
    model = backbone()
    check_attention_window(model)
    model.base_model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager' attention ignores the window"):
        check_attention_window(model)
    with pytest.raises(ValueError, match="'eager' attention ignores the window"):
        sliding_window_log_likelihood(model, pack_sequence(documents(60)), context_length=4)


def test_a_window_as_long_as_the_text_changes_nothing():
    model, batch = backbone(), pack_sequence(documents(60, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(batch, window=60), model(batch), rtol=0, atol=2e-6)


def test_masks_of_another_thread_are_those_of_transformers():
    """A thread that generates, or scores without our attention, needs what transformers makes of its positions."""
    positions = torch.tensor([[0, 1, 0, 1]])
    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with documents_by_boundaries("document_sdpa", positions), ThreadPoolExecutor(1) as thread:
        assert masking_utils.find_packed_sequence_indices(positions) is None
        assert document_mask(**arguments) is None
        assert thread.submit(masking_utils.find_packed_sequence_indices, positions).result().tolist() == [[0, 0, 1, 1]]
        # A mask that the model needs separates the documents, in our thread only.
        ours = document_mask(**arguments, allow_is_causal_skip=False)
        theirs = thread.submit(document_mask, **arguments, allow_is_causal_skip=False).result()
    causal = torch.ones(4, 4).tril().bool()
    assert torch.equal(theirs[0, 0], causal)
    assert torch.equal(ours[0, 0], torch.block_diag(torch.ones(2, 2), torch.ones(2, 2)).bool() & causal)
    assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 1, 1]]
