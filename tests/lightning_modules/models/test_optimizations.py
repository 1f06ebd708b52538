"""Optimizations change memory and time, and not what is computed."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.optimizations import (
    ATTENTION_OPERATORS,
    enable_checkpointing,
    use_bfloat16_residual,
)
from lightning_modules.training.preflight import check_trainable
from longce.plan.shapes import ModelShape
from tests.conftest import tiny_config, tiny_model
from tests.support.operators import ATTENTION, OperatorCounts
from tests.support.packing import assume_isolation, build, documents, packed

ARCHITECTURES = [
    ("llama", {}),
    ("mistral", {"sliding_window": 5}),
    ("qwen3", {"head_dim": 8}),
    ("phi3", {}),
    ("cohere", {}),
    ("gemma3_text", {"head_dim": 8, "sliding_window": 9}),
    ("gpt2", {}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
]


def step(kind, autocast=False, offload=False, layers=None):
    model = build("llama").train()
    enable_checkpointing(model, kind, layers=layers, offload=offload)
    scorer = assume_isolation(Backbone(model))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), OperatorCounts() as counts:
        (-scorer(packed(documents(30, 8), documents(38))).mean()).backward()
    return counts.calls[ATTENTION], {name: p.grad for name, p in scorer.named_parameters()}


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_the_same_bit_for_bit_and_attention_is_computed_once(autocast):
    none, full, selective = (step(kind, autocast) for kind in (False, True, "selective"))
    assert (none[0], full[0], selective[0]) == (6, 12, 6), "two layers, three documents"
    for name, gradient in full[1].items():
        assert torch.equal(selective[1][name], gradient), name


@pytest.mark.parametrize("kind", [True, "selective"])
def test_gradients_are_the_same_bit_for_bit_with_offloaded_layer_inputs(kind):
    expected, actual = step(kind)[1], step(kind, offload=True)[1]
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize(("kind", "passes"), [(True, 9), ("selective", 6)])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_the_same_bit_for_bit_where_one_layer_of_two_is_checkpointed(kind, passes, offload):
    calls, gradients = step(kind, layers=1, offload=offload)
    assert calls == passes, "of 6 without and 12 with full checkpointing"
    for name, gradient in step(kind)[1].items():
        assert torch.equal(gradients[name], gradient), name


def test_a_number_of_checkpointed_layers_that_cannot_be_is_refused():
    for kind, layers in ((False, 1), ("auto", 1), (True, 0)):
        with pytest.raises(ValueError, match="`checkpointed_layers` must be 1 or more, with"):
            ModelConfig("model", gradient_checkpointing=kind, checkpointed_layers=layers)
    with pytest.raises(ValueError, match="`checkpointed_layers` = 3 exceeds the 2 layers of the model"):
        step(True, layers=3)
    text = tiny_config()
    with pytest.raises(ValueError, match=r"`model.checkpointed_layers` = 9 exceeds the 2 layers of the model"):
        check_trainable(ModelConfig("model", gradient_checkpointing=True, checkpointed_layers=9), text)


def test_layers_of_a_picture_encoder_are_not_counted():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = Gemma3Config(
        text_config=sizes | {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 4, "vocab_size": 50},
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
    )
    model = Gemma3ForConditionalGeneration(config)
    enable_checkpointing(model, True, layers=2)
    layers = model.get_decoder().layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, False, False]
    assert ModelShape.of(config).checkpointed == 4


def test_offloading_without_checkpointing_is_refused():
    with pytest.raises(ValueError, match="set `gradient_checkpointing` to true"):
        ModelConfig("model", offload_activations=True)


@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES)
def test_the_residual_stream_is_bfloat16_in_all_layers(architecture, overrides):
    def run(residual):
        backbone = assume_isolation(Backbone(tiny_model(architecture, 90, num_hidden_layers=3, **overrides).train()))
        if residual == "bfloat16":
            use_bfloat16_residual(backbone.decoder)
        seen = []
        for layer in backbone.decoder.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=residual != "exact"):
            backbone(packed([torch.arange(60) % 90])).mean().backward()
        return set(seen), torch.cat([parameter.grad.flatten() for parameter in backbone.parameters()])

    (_, exact), (wide, usual), (narrow, actual) = run("exact"), run("float32"), run("bfloat16")
    assert (wide, narrow) == ({torch.float32}, {torch.bfloat16})
    assert 0 < (actual - exact).norm() < 2 * (usual - exact).norm()


@pytest.mark.parametrize(
    ("autocast", "residual", "expected"),
    [(True, "bfloat16", torch.bfloat16), (True, "float32", torch.float32), (False, "bfloat16", torch.float32)],
)
@torch.no_grad()
def test_a_model_for_mixed_precision_has_the_configured_residual_stream(autocast, residual, expected):
    config = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    backbone = load_backbone(ModelConfig(model_config=config, residual_dtype=residual), autocast=autocast)
    seen = []
    backbone.decoder.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        backbone(packed(documents(9)))
    assert seen == [expected]


def test_attention_that_cannot_be_kept_and_other_words_are_refused():
    with pytest.raises(ValueError, match=r"has 'eager'.*attn_implementation"):
        enable_checkpointing(build("llama", attention="eager"), "selective")
    enable_checkpointing(build("llama", attention="eager"), True)


def test_the_operators_of_torch_that_are_kept_exist():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    assert set(filter(ATTENTION_OPERATORS.fullmatch, names)) == {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
