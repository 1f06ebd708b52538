import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from lightning_modules.export import model as export_module
from lightning_modules.export.merge import merge_layer
from lightning_modules.models.loading.adapters import add_adapters
from lightning_modules.training.facts import TrainingFacts
from tests.conftest import tiny_model
from tests.support.exports import TARGETS, adapted, export, logits


def merged_weight(layer, dtype):
    """The weight of a layer with its adapters merged; the layer itself does not change."""
    layer = copy.deepcopy(layer)
    merge_layer(layer)
    return layer.get_base_layer().weight.to(dtype)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("lora", "tied", "stays_tied"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"use_dora": True}, False, False),
        ({"use_rslora": True, "lora_alpha": 3}, True, True),
        ({"target_modules": ["q_proj", "lm_head"]}, True, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True, False),
        ({"modules_to_save": ["lm_head"]}, True, False),
        ({"modules_to_save": ["embed_tokens"]}, True, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True, True),
        ({"modules_to_save": ["input_layernorm"]}, False, False),
        ({"trainable_token_indices": [3, 5]}, False, False),
    ],
)
def test_merged_logits_are_those_of_the_adapters_and_the_config_says_what_is_tied(lora, tied, stays_tied, tmp_path):
    model = adapted(tied=tied, **lora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model)
    loaded = export(model, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert (logits(model) - expected).abs().max() > 0.1, "the adapters do something"

    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == stays_tied
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (not stays_tied)

    assert torch.equal(logits(model), expected)
    assert model.get_base_model().config.tie_word_embeddings == tied
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_half_precision_base_is_merged_in_float32_and_rounded_once(tmp_path):
    layer = adapted(dtype=torch.bfloat16).get_base_model().model.layers[0].self_attn.q_proj
    base, (a, b) = layer.base_layer.weight, (layer.lora_A.default.weight, layer.lora_B.default.weight)
    expected = base.double() + layer.scaling["default"] * b.double() @ a.double()
    assert torch.equal(merged_weight(layer, torch.bfloat16), expected.to(torch.bfloat16))
    torch.testing.assert_close(merged_weight(layer, torch.float32), expected.float())
    assert layer.merged_adapters == []
    assert base.dtype == torch.bfloat16


def test_shards_hold_a_few_layers_each_and_the_index_finds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "SHARD_SIZE", 60_000)
    model = adapted(tied=True)
    loaded = export(model, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    for tensors in files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
    # A later export with one file leaves nothing of this one.
    monkeypatch.undo()
    export(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("model-*"))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("dtype", "model_type"),
    [("auto", "qwen2"), ("auto", "mixtral"), ("bfloat16", "qwen2"), ("float16", "mixtral"), ("float16", "llama")],
)
def test_types_of_weights_also_of_biases_and_experts(dtype, model_type, tmp_path):
    model = adapted(model_type=model_type, target_modules=["q_proj", "v_proj"])
    loaded = export(model, tmp_path / "out", dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {wanted}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(wanted).removeprefix("torch.")
    assert config["architectures"] == [type(loaded).__name__]
    expected = merged_weight(model.get_base_model().model.layers[0].self_attn.q_proj, wanted)
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.weight, expected)
    assert ("rounded after training" in (tmp_path / "out" / "README.md").read_text()) == (dtype != "auto")
    if dtype == "auto":
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)


def test_adapters_on_half_precision_weights_are_exported_in_one_type_and_exactly_in_float32(tmp_path):
    model = add_adapters(
        tiny_model(dtype=torch.bfloat16),
        {"r": 2, "target_modules": TARGETS, "modules_to_save": ["norm"]},
        autocast=True,
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    facts = TrainingFacts(lora={"r": 2})
    for dtype, stored in (("auto", torch.bfloat16), ("float32", torch.float32)):
        loaded = export(model, tmp_path / dtype, facts, dtype=dtype)
        assert {tensor.dtype for tensor in load_file(tmp_path / dtype / "model.safetensors").values()} == {stored}
        words = f"stored in {str(stored).removeprefix('torch.')}" + ", rounded after training" * (dtype == "auto")
        assert words in (tmp_path / dtype / "README.md").read_text()
    torch.testing.assert_close(logits(loaded), logits(model.float()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_experts_are_merged(dtype, tmp_path):
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(model_type="mixtral", dtype=dtype, target_modules=["q_proj"], target_parameters=experts)
    loaded = export(model, tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model.float()), rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert (logits(loaded) - logits(model)).abs().max() > 0.1, "the adapters do something"


def test_merged_experts_are_rounded_once(tmp_path):
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(model_type="mixtral", target_modules=["q_proj"], target_parameters=experts)
    expected = copy.deepcopy(model).merge_and_unload().to(torch.bfloat16).state_dict()
    found = export(model, tmp_path / "out", dtype="bfloat16").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_adapters_that_peft_cannot_merge_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lora_bias.*'kept'"):
        export(adapted(lora_bias=True), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
