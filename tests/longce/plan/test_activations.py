"""Against tiny models that really run, with torch's own attention, on the CPU."""

import gc
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import use_bfloat16_residual
from longce.plan.activations import ActivationBytes, TokenMemory
from longce.plan.memory import Training
from longce.plan.sizes import ModelSizes
from tests.conftest import tiny_config

TOKENS = 257  # a prime, see `TokenMemory`
SIZES = {"hidden_size": 64, "intermediate_size": 224, "head_dim": 16}


def config(architecture, layers):
    if architecture == "gpt2":
        # With dropout, torch's attention on the CPU keeps a matrix of token by token.
        sizes = {"n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": 512, "attn_pdrop": 0.0}
        return AutoConfig.for_model("gpt2", vocab_size=400, **sizes)
    return tiny_config(architecture, num_hidden_layers=layers, **SIZES)


def model(settings, dtype, lora=None, checkpointing=False):
    result = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=dtype)
    if checkpointing:
        result.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        result = get_peft_model(result, LoraConfig(task_type="CAUSAL_LM", **lora))
    result.get_input_embeddings().weight.requires_grad_()
    backbone = Backbone(result).train()
    use_bfloat16_residual(backbone.decoder)
    return backbone


def forward(backbone, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return backbone.decoder(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).last_hidden_state


def saved(backbone, autocast):
    """Bytes per token that autograd saves: unique storages of a size that grows with the tokens."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() % TOKENS == 0:
            storages[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(backbone, autocast)
    assert output.requires_grad
    return sum(size for _, size in storages.values()) / TOKENS


def peak(backbone, autocast):
    """Bytes per token alive at the same time in a checkpointed step."""
    gc.collect()
    with TokenMemory(TOKENS) as memory:
        hidden_states = forward(backbone, autocast)
        torch.autograd.backward(hidden_states, torch.empty_like(hidden_states))
    return (memory.peak - 2 * hidden_states.untyped_storage().nbytes()) / TOKENS


CASES = [
    ("llama", torch.float32, False, None),
    ("llama", torch.bfloat16, False, None),
    ("llama", torch.float32, True, None),
    ("llama", torch.float32, True, {"r": 4, "target_modules": "all-linear"}),
    ("llama", torch.bfloat16, False, {"r": 4, "target_modules": "all-linear"}),
    ("qwen2", torch.bfloat16, False, None),
    ("gpt2", torch.bfloat16, False, None),
    ("gpt2", torch.float32, True, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype", "mixed", "lora"), CASES)
def test_what_a_layer_keeps_and_needs(architecture, dtype, mixed, lora):
    planned = ActivationBytes(
        config(architecture, 4), dtype=dtype, autocast=torch.bfloat16 if mixed else None, lora=lora
    )
    two, four = (saved(model(config(architecture, layers), dtype, lora), mixed) for layers in (2, 4))
    assert planned.layer == pytest.approx((four - two) / 2, rel=0.15)
    two, four = (saved(model(config(architecture, layers), dtype, lora, True), mixed) for layers in (2, 4))
    assert planned.layer_input == (four - two) / 2
    measured = peak(model(config(architecture, 2), dtype, lora, True), mixed)
    assert planned.layer_backward + 2 * planned.layer_input == pytest.approx(measured, rel=0.15)
    with torch.no_grad(), TokenMemory(TOKENS) as memory:
        forward(model(config(architecture, 1), dtype, lora), mixed)
    assert planned.forward == pytest.approx(memory.peak / TOKENS, rel=0.15)


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.float32, True), (torch.float32, False), (torch.float16, False)])
def test_experts_in_other_types_than_bfloat16(dtype, mixed):
    """torch multiplies tensors without data for experts in bfloat16 only."""
    settings = [
        tiny_config("mixtral", num_hidden_layers=layers, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
        for layers in (1, 2)
    ]
    planned = ActivationBytes(settings[1], dtype, torch.bfloat16 if mixed else None)
    one, two = (saved(model(each, dtype), mixed) for each in settings)
    assert planned.layer == pytest.approx(two - one, rel=0.01)


def test_experts_have_the_type_in_which_fsdp2_gathers_their_weights():
    sizes = ModelSizes(tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=8))
    alone = Training(1024, checkpointing="full")
    layer = "one layer's backward pass"
    gathered, float32, bfloat16 = (
        sizes.training_memory(each, None).phases["backward pass"][layer]
        for each in (
            replace(alone, sharded=True, gpus=2),
            alone,
            replace(alone, dtype=torch.bfloat16, sharded=True, gpus=2),
        )
    )
    assert gathered == bfloat16 < float32


def test_layer_inputs_are_half_in_a_bfloat16_residual_stream():
    settings = {"dtype": torch.float32, "autocast": torch.bfloat16}
    half, whole = (ActivationBytes(config("llama", 2), **settings, bfloat16_residual=half) for half in (True, False))
    assert (half.layer_input, whole.layer_input) == (2 * 64, 4 * 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_keep_what_as_many_dense_layers_would(name):
    sizes = {"num_experts" if name == "qwen3_moe" else "num_local_experts": 4, "moe_intermediate_size": 32}
    kept = [
        ActivationBytes(tiny_config(name, num_experts_per_tok=chosen, head_dim=8, **sizes), dtype=torch.bfloat16).layer
        for chosen in (1, 2, 3)
    ]
    assert kept[2] - kept[1] == pytest.approx(kept[1] - kept[0], rel=0.01)
    assert kept[1] > kept[0]
