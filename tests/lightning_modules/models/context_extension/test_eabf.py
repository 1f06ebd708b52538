import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.eabf import entropy_scale
from lightning_modules.models.context_extension.rope_types import (
    BACKENDS,
    RopeTypeAttention,
    register_rope_types,
)
from lightning_modules.models.context_extension.rotary_checks import check_rotary
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from tests.conftest import tiny_model
from tests.lightning_modules.models.context_extension.patterns import dense
from tests.support.architectures import ROPE
from tests.support.packing import assume_isolation
from tests.support.tiny_training import row

VOCABULARY, ORIGINAL, TARGET, LENGTH = 50, 16, 64, 60


def settings_of(method="eabf"):
    return {"method": method, "original_length": ORIGINAL, "target_length": TARGET}


@pytest.fixture
def folder(tmp_path):
    def save(architecture="llama"):
        settings = {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            **ROPE.get(architecture, {}),
        }
        tiny_model(architecture, VOCABULARY, **settings).save_pretrained(tmp_path / architecture)
        return str(tmp_path / architecture)

    return save


def float64_scale(positions, unscaled):
    scales = [max(1.0, math.log(int(position) + 1) / math.log(ORIGINAL)) for position in positions]
    return torch.tensor([1.0] * len(scales) if unscaled else scales, dtype=torch.float64)


def test_every_layer_equals_dense_attention(folder):  # others: `test_architectures.py`
    backbone = assume_isolation(load_backbone(ModelConfig(folder(), context_extension=settings_of())))
    check_every_layer(backbone, (0, 7, 40, LENGTH), unscaled_layers=2)


@pytest.mark.parametrize("attention", ["sdpa", "document_sdpa"])
@pytest.mark.parametrize(("architecture", "theta"), [("llama", 500000.0), ("mistral", 10000.0)])
def test_the_authors_leave_no_layer_unscaled(attention, architecture, theta, folder):
    settings = {"method": "eabf_authors", "original_length": 4096, "target_length": 32768}
    backbone = assume_isolation(load_backbone(ModelConfig(folder(architecture), context_extension=settings)))
    backbone.base_model.set_attn_implementation(attention)
    backbone.base_model.config.rope_parameters["original_max_position_embeddings"] = ORIGINAL  # for short rows
    check_every_layer(backbone, (0, 7, LENGTH), unscaled_layers=0, theta=theta)


@torch.no_grad()
def check_every_layer(backbone, boundaries, *, unscaled_layers, theta=500000.0):
    batch = row(0, boundaries, VOCABULARY)
    seen = dense.record_layers(backbone, batch)
    assert len(seen) == 4
    for number, (layer, hidden_states, actual) in enumerate(seen):
        scale = float64_scale(batch["position_ids"][0], number < unscaled_layers)
        plain = dense.layer_output(layer, hidden_states, boundaries, name="plain", theta=theta)
        expected = dense.layer_output(layer, hidden_states, boundaries, name="plain", theta=theta, scale=scale)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        if scale.max() > 1:  # or the comparison could not fail
            assert (plain - expected).abs().max() > 1e-2 * expected.abs().max()


def test_scales_equal_the_formula():
    positions = torch.tensor([[0, 1, 4094, 4095, 4096, 5000, 32767, 100_000]])
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            actual = entropy_scale(positions, 4096)
        finally:
            torch.set_default_dtype(torch.float32)
        expected = [max(1.0, math.log(position + 1) / math.log(4096)) for position in positions[0].tolist()]
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual[0].double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    for original in range(2, 500):  # among them 7, 47, 49 and 402, whose rounded quotient is above 1
        assert (entropy_scale(torch.arange(original), original) == 1).all()


def test_bf16_queries_are_rounded_once():
    given = []
    attention = RopeTypeAttention(lambda module, query, *_, **__: given.append(query))
    rope = {"rope_type": "eabf", "unscaled_layers": 0, "original_max_position_embeddings": 4096}
    module = SimpleNamespace(config=SimpleNamespace(rope_parameters=rope), layer_idx=0)
    query = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    attention(module, query, position_ids=torch.tensor([[4000, 9001, 30001]]))
    scale = torch.tensor([1.0, math.log(9002) / math.log(4096), math.log(30002) / math.log(4096)]).double()
    assert torch.equal(given[0], (query.double() * scale[:, None]).bfloat16())


def abf_of(backbone):
    """The same weights at the same base, without the scaling."""
    config = copy.deepcopy(backbone.base_model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backbone.attention)
    model.load_state_dict(backbone.base_model.state_dict())
    return Backbone(model.eval())


def test_below_the_original_length_it_is_abf_bit_for_bit_and_beyond_it_is_not(folder):
    eabf = load_backbone(ModelConfig(folder(), context_extension=settings_of())).eval()
    abf = abf_of(eabf)
    tokens = row(1, (0, LENGTH), VOCABULARY)["input_ids"]
    with torch.no_grad():
        actual, plain = (part.model(tokens, use_cache=False).logits for part in (eabf, abf))
        assert torch.equal(actual[:, :ORIGINAL], plain[:, :ORIGINAL])
        assert ((actual - plain)[:, ORIGINAL:].abs().amax(-1) > 1e-3).all()
        packed = row(1, (0, ORIGINAL, 2 * ORIGINAL, LENGTH), VOCABULARY)
        difference = (eabf(packed) - abf(packed)).abs()
    assert (difference[:, : 2 * ORIGINAL] == 0).all()
    assert (difference[:, 3 * ORIGINAL + 1 :] > 0).any()


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_gradients_with_checkpointing_and_lora(checkpointing, folder):
    gradients = []
    for kind in (False, checkpointing):
        torch.manual_seed(0)
        lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        path = folder()
        backbone = load_backbone(
            ModelConfig(path, context_extension=settings_of(), gradient_checkpointing=kind, lora=lora)
        ).train()
        loss = -backbone(row(3, (0, 20, LENGTH), VOCABULARY)).sum()
        loss.backward()
        gradients.append([p.grad for p in backbone.parameters() if p.requires_grad])
    assert len(gradients[0]) == 16
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_wrapped_once(name, folder, monkeypatch):
    """With torch's attention in the place of kernels that this machine may lack."""
    backbone = load_backbone(ModelConfig(folder(), context_extension=settings_of())).eval()
    tokens = row(5, (0, LENGTH), VOCABULARY)["input_ids"]
    with torch.no_grad():
        expected = backbone.model(tokens, use_cache=False).logits
    register_rope_types()
    wrapper = AttentionInterface()[name]
    assert isinstance(wrapper, RopeTypeAttention)
    assert not isinstance(wrapper.attention, RopeTypeAttention)

    def causal(module, query, key, value, *_, scaling, **__):
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(wrapper, "attention", causal)
    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None)
    backbone.base_model.config._attn_implementation_internal = name
    with torch.no_grad():
        torch.testing.assert_close(backbone.model(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-3)
    check_rotary(backbone.base_model)


def test_another_model_loaded_later_does_not_undo_it(folder):
    eabf = load_backbone(ModelConfig(folder(), context_extension=settings_of())).eval()
    batch = row(6, (0, LENGTH), VOCABULARY)
    with torch.no_grad():
        before = eabf(batch)
        load_backbone(ModelConfig(folder("qwen2")))
        assert torch.equal(eabf(batch), before)


def test_eager_attention_is_refused_at_load_and_noticed_later(folder):
    path = folder()
    with pytest.raises(ValueError, match="does not support 'eager' attention"):
        load_backbone(ModelConfig(path, context_extension=settings_of(), attn_implementation="eager"))
    backbone = load_backbone(ModelConfig(path, context_extension=settings_of()))
    check_rotary(backbone.base_model)
    backbone.base_model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="'eager' ignores the model's RoPE type"):
        check_rotary(backbone.base_model)


def test_an_architecture_that_would_not_be_scaled_is_refused():
    register_rope_types()
    rope = {"rope_type": "eabf", "rope_theta": 5e5, "original_max_position_embeddings": 16, "unscaled_layers": 2}
    config = AutoConfig.for_model("falcon", hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    with pytest.raises(ValueError, match=r"supports models of type llama.*not 'falcon'"):
        AutoModelForCausalLM.from_config(config)
