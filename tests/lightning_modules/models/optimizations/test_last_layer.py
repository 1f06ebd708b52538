import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_modules.models.optimizations.last_layer import last_layer_reads_from
from tests.conftest import tiny_model

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


@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES)
@torch.no_grad()
def test_what_is_read_is_the_same(architecture, overrides):
    decoder = tiny_model(architecture, 90, **overrides).get_decoder()
    tokens = torch.randint(90, (3, 20), generator=torch.Generator().manual_seed(0))
    expected = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    with last_layer_reads_from(decoder, 14):
        actual = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual[:, 14:], expected[:, 14:])
    if architecture in ("llama", "qwen3_moe"):
        assert not torch.allclose(actual[:, :14], expected[:, :14]), "it saved nothing"
    after = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.equal(after, expected), "it stayed on"


@torch.no_grad()
def test_only_the_last_layer_is_spared_and_only_where_nobody_reads():
    model = tiny_model("llama", 90)
    lengths = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda _, inputs, __, name=name: lengths.__setitem__(name, inputs[0].shape[1]), always_call=True
            )
    with last_layer_reads_from(model.get_decoder(), 14):
        model.get_decoder()(input_ids=torch.zeros(1, 20, dtype=torch.int64), use_cache=False)
    spared = {name for name, length in lengths.items() if length == 6}
    assert spared == {
        f"model.layers.1.{part}"
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert all(lengths[name] == 20 for name in lengths if name not in spared)


@torch.no_grad()
def test_adapters_inside_the_layer_count():
    model = get_peft_model(
        tiny_model("llama", 90), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval()
    decoder = model.get_base_model().get_decoder()
    tokens = torch.randint(90, (1, 20), generator=torch.Generator().manual_seed(0))
    expected = decoder(input_ids=tokens, use_cache=False).last_hidden_state[:, 9:]
    with last_layer_reads_from(decoder, 9):
        actual = decoder(input_ids=tokens, use_cache=False).last_hidden_state[:, 9:]
    torch.testing.assert_close(actual, expected)
