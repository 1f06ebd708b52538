import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, GPT2LMHeadModel

from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.models.loading.adapters import add_adapters
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from longce.plan.shapes import ModelShape
from tests.conftest import tiny_config, tiny_model

ADAPTERS = {"r": 4, "target_modules": "all-linear"}


def gpt2(**overrides):
    return AutoConfig.for_model("gpt2", vocab_size=400, n_embd=32, n_layer=3, n_head=4, n_positions=512, **overrides)


def test_published_sizes(llamas):
    seven, eight = (ModelShape.of(config) for config in llamas.values())
    assert (seven.parameters, eight.parameters) == (6_738_415_616, 8_030_261_248)  # as their model cards say
    per_layer = 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
    assert eight.layer_weights == eight.trained_layer_weights == 32 * per_layer
    assert eight.head_weights == 4096 * 128256
    assert (eight.layers, eight.output_width, eight.pair_flops) == (32, 4096, 2 * 32 * (128 + 128))
    assert not eight.tied


def test_only_chosen_experts_count():
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    shape = ModelShape.of(tiny_config("qwen3_moe", **sizes))
    attention = 32 * (32 + 16 + 16 + 32)
    assert shape.layer_weights == 2 * (attention + 8 * 32 + 2 * 3 * 32 * 16)
    assert shape.largest_layer > attention + 8 * 3 * 32 * 16


def test_tied_head_counts_once_and_conv1d_counts():
    shape = ModelShape.of(gpt2())
    assert shape.tied
    assert shape.layer_weights == 3 * 12 * 32 * 32
    assert shape.parameters == sum(p.numel() for p in GPT2LMHeadModel(gpt2()).parameters())


def test_lora_counts_what_peft_trains():
    shape = ModelShape.of(tiny_config(), ADAPTERS)
    model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", **ADAPTERS))
    assert (shape.trained, shape.parameters) == model.get_nb_trainable_parameters()
    assert shape.trained_layer_weights == shape.trained
    assert not shape.head_trained


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_norms_trained_in_full(tied):
    arguments = {**ADAPTERS, "modules_to_save": "embeddings-and-norms"}
    shape = ModelShape.of(tiny_config(tie_word_embeddings=tied), arguments)
    model = add_adapters(tiny_model(tie_word_embeddings=tied), arguments)
    assert (shape.trained, shape.parameters) == model.get_nb_trainable_parameters()
    assert (shape.tied, shape.head_trained) == (tied, tied)
    assert shape.head_weights == 400 * 32


def test_quantizable_weights_are_those_that_bitsandbytes_takes(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model("qwen2", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    arguments = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    backbone = load_backbone(ModelConfig(str(tmp_path), quantization=arguments, lora=ADAPTERS))
    weights = [p for p in backbone.parameters() if p.dtype == torch.uint8]
    assert 2 * sum(p.numel() for p in weights) == ModelShape.of(backbone.base_model.config, ADAPTERS).quantizable


def test_windows_of_each_layer():
    alternating = tiny_config("gemma2", sliding_window=16, head_dim=8, num_hidden_layers=4)
    assert ModelShape.of(alternating).windows == (16, None, 16, None)
    assert ModelShape.of(tiny_config("mistral", sliding_window=8)).windows == (8, 8)
    assert ModelShape.of(tiny_config("qwen2", sliding_window=8)).windows == (None, None)  # needs `use_sliding_window`


@pytest.mark.parametrize(("name", "message"), [("qwen3_next", "linear_attention"), ("mamba", "no attention heads")])
def test_other_layers_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.of(AutoConfig.for_model(name))


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("lm_infinite", 74),
        ("rerope", None),
        ("longnet", 2048 * 3 + 16384 // 6 + 1 + 32768 // 12 + 1),
    ],
)
def test_keys_of_an_attention_pattern(method, keys):
    config = tiny_config()
    extend_config(config, ContextExtension(method, 64, 512))
    register_rope_types()
    assert ModelShape.of(config).windows == (keys, keys)
