import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_modules.models.optimizations.low_precision import check_short_dtype, short_precision
from tests.conftest import tiny_model

CPU = torch.device("cpu")


def reference_float8_linear(linear, inputs):
    """One product of two rounded numbers at a time, in float64."""

    def rounded(rows):
        scale = rows.abs().amax(-1, keepdim=True).float() / 448
        return (rows / scale).to(torch.float8_e4m3fn).double() * scale.double()

    output = torch.zeros(*inputs.shape[:-1], linear.out_features, dtype=torch.float64)
    weight = rounded(linear.weight)
    for index in range(linear.out_features):
        output[..., index] = (rounded(inputs) * weight[index]).sum(-1)
    return output + (0 if linear.bias is None else linear.bias.double())


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_float8_linear_matches_products_of_rounded_numbers(bias):
    torch.manual_seed(0)
    decoder = nn.Sequential(nn.Linear(48, 32, bias=bias))
    inputs = torch.randn(2, 5, 48) * torch.tensor([1e-3, 1.0]).view(2, 1, 1)
    with short_precision(decoder, CPU, "float8"):
        actual = decoder(inputs)
    expected = reference_float8_linear(decoder[0], inputs)
    assert actual.dtype == torch.bfloat16
    for ours, theirs, exact in zip(actual.double(), expected, decoder(inputs).double(), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 0.004, "bfloat16 rounds the sums"
        if not bias:  # which would drown the small inputs' products
            assert 0.01 < (ours - exact).norm() / exact.norm() < 0.06, "e4m3 keeps three bits"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@torch.no_grad()
def test_within_only_and_weights_untouched(dtype):
    model = tiny_model("llama", 90)
    decoder = model.get_decoder()
    tokens = torch.arange(40).unsqueeze(0)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    expected = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    with short_precision(decoder, CPU, dtype):
        rough = decoder(input_ids=tokens, use_cache=False).last_hidden_state.float()
    assert 1e-4 < (rough - expected).norm() / expected.norm() < 0.5
    assert torch.equal(decoder(input_ids=tokens, use_cache=False).last_hidden_state, expected)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_error_within_leaves_no_trace():
    decoder = tiny_model("llama", 90).get_decoder()
    with pytest.raises(KeyError), short_precision(decoder, CPU, "float8"):
        raise KeyError
    assert not any("forward" in vars(module) for module in decoder.modules())


@torch.no_grad()
def test_adapters_and_sides_that_do_not_fit_stay_as_they_are():
    decoder = nn.ModuleDict({"odd": nn.Linear(24, 16), "fits": nn.Linear(16, 32), "other": nn.Bilinear(2, 2, 2)})
    with short_precision(decoder, CPU, "float8"):
        assert [name for name, module in decoder.items() if "forward" in vars(module)] == ["fits"]
    peft_model = get_peft_model(tiny_model("llama", 90), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with short_precision(peft_model, CPU, "float8"):
        replaced = [name for name, module in peft_model.named_modules() if "forward" in vars(module)]
    assert any(name.endswith("q_proj.base_layer") for name in replaced)
    assert not any("lora" in name.rpartition(".")[2] for name in replaced)


@torch.no_grad()
def test_a_layer_with_a_forward_of_its_own_keeps_it():
    decoder = nn.Sequential(nn.Linear(16, 16))
    decoder[0].forward = lambda inputs: inputs + 7
    with short_precision(decoder, CPU, "float8"):
        assert decoder(torch.zeros(1, 16)).eq(7).all()
    assert decoder(torch.zeros(1, 16)).eq(7).all()


def test_a_card_without_8_bit_units_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    check_short_dtype("float8", CPU)
    check_short_dtype("bfloat16", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"capability 8\.9.*A100 has 8\.0.*bfloat16"):
        check_short_dtype("float8", torch.device("cuda"))
