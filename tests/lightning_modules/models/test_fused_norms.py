"""Fused norms compute what the models' own norms do, and are found in every architecture by their values."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.optimizations import FusedNorm, compile_layers, fuse_norms, fused_norms, unfused
from tests.conftest import tiny_model
from tests.support.architectures import NAMES, tiny_config
from tests.support.packing import assume_isolation, documents, packed

DTYPES = [  # of hidden states and weight
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),  # mixed precision with a residual stream in bfloat16
    (torch.float32, torch.bfloat16),
]


def exact_norm(hidden_states, weight, epsilon, offset):
    """Return the norm of each token, one by one, in float64."""
    rows = hidden_states.double().flatten(0, -2)
    normalized = [row / (row.square().mean() + epsilon).sqrt() * (weight.double() + offset) for row in rows]
    return torch.stack(normalized).view(hidden_states.shape)


def gradients(norm, hidden_states, grad_output):
    hidden_states = hidden_states.clone().requires_grad_()
    norm.zero_grad()
    output = norm(hidden_states)
    output.backward(grad_output.to(output.dtype))
    return output.detach(), hidden_states.grad, norm.weight.grad


def norms_of(name):
    """Return one norm of each class, dimension and formula of an architecture, that is fused, with random weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    fuse_norms(model)
    found = {(type(norm), norm.weight.shape, norm.fused_norm): norm for norm in fused_norms(model)}
    for norm in found.values():
        norm.to_empty(device="cpu")
        nn.init.normal_(norm.weight)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_norms_of_every_architecture_round_less_than_their_own(name):
    torch.manual_seed(0)
    for fused in norms_of(name):
        for states_dtype, weight_dtype in DTYPES:
            fused.to(weight_dtype)
            written = copy.deepcopy(fused)
            del written.forward
            shape = (2, 3, *fused.weight.shape)
            hidden_states = (torch.randn(shape) * torch.tensor([1e-3, 1.0, 30.0])[:, None]).to(states_dtype)
            grad_output = torch.randn(shape)
            with torch.enable_grad():
                actual = gradients(fused, hidden_states, grad_output)
                expected = gradients(written, hidden_states, grad_output)
                states = hidden_states.double().requires_grad_()
                weight = fused.weight.detach().double().requires_grad_()
                exact = exact_norm(states, weight, fused.fused_norm.epsilon, fused.fused_norm.offset)
                exact_gradients = torch.autograd.grad(exact, (states, weight), grad_output.to(actual[0].dtype).double())
            for value, own, reference in zip(actual, expected, (exact.detach(), *exact_gradients), strict=True):
                assert value.dtype == own.dtype, (type(fused), states_dtype, weight_dtype)
                error, own_error = ((each.double() - reference).norm() / reference.norm() for each in (value, own))
                assert error <= max(1.1 * own_error, 1e-6), (type(fused), states_dtype, weight_dtype)
                if torch.bfloat16 not in (states_dtype, weight_dtype):
                    torch.testing.assert_close(value, own, rtol=1e-5, atol=1e-5)


class Centered(nn.Module):
    """A layer norm without bias, which the mean of its input distinguishes from a root mean square norm."""

    def __init__(self, epsilon=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), epsilon

    def forward(self, states):
        return nn.functional.layer_norm(states, (16,), self.weight, eps=self.eps)


class Gated(Centered):
    def forward(self, states, gate=None):
        output = nn.functional.rms_norm(states, (16,), self.weight, self.eps)
        return output if gate is None else output * gate


class EpsilonOutside(Centered):
    def forward(self, states):
        return self.weight * states / (states.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class OfPairs(Centered):
    def forward(self, states):
        return (self.weight * nn.functional.rms_norm(states.unflatten(-1, (-1, 2)), (2,), eps=self.eps).flatten(-2)).to(
            states.dtype
        )


@pytest.mark.parametrize("kind", [Centered, Gated, EpsilonOutside, OfPairs])
def test_other_norms_stay_as_they_are(kind):
    model = nn.Sequential(kind())
    assert fuse_norms(model) == 0
    assert "forward" not in vars(model[0])


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("gemma3_text", {"head_dim": 8}), ("qwen3", {})])
def test_scores_and_gradients_of_models(name, options, autocast):
    def run(model, dtype=torch.float32):
        backbone = assume_isolation(Backbone(model.to(dtype)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype != torch.float64):
            scores = backbone(packed(documents(20, 18)))
        scores.mean().backward()
        return scores.detach().double(), torch.cat([each.grad.flatten() for each in backbone.parameters()]).double()

    written, fused = (tiny_model(name, num_hidden_layers=3, **options) for _ in range(2))
    keys = fused.state_dict().keys()
    assert fuse_norms(fused) >= 7
    assert fused.state_dict().keys() == keys
    exact = run(copy.deepcopy(written), torch.float64)
    for actual, own, reference in zip(run(fused), run(written), exact, strict=True):
        if not autocast:
            torch.testing.assert_close(actual, own, rtol=1e-5, atol=1e-6)
        assert (actual - reference).norm() <= max(1.5 * (own - reference).norm(), 1e-6)


def test_copies_adapters_and_compiled_norms_use_their_own_weights():
    model = tiny_model("llama", num_hidden_layers=2)
    fuse_norms(model)
    duplicate = copy.deepcopy(model)
    nn.init.ones_(duplicate.model.norm.weight)
    adapted = get_peft_model(duplicate, LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    trained = adapted.base_model.model.model.norm.modules_to_save.default
    with torch.no_grad():
        trained.weight.fill_(3.0)
    states = torch.randn(2, model.config.hidden_size)
    expected = 3 * nn.functional.rms_norm(states, states.shape[1:], eps=model.config.rms_norm_eps)
    torch.testing.assert_close(trained(states), expected)
    torch.testing.assert_close(adapted.base_model.model.model.norm(states), expected)
    check_scoring(Backbone(adapted))
    compile_layers(model.get_decoder(), backend="eager")
    with unfused(model):
        expected = model.model.layers[0].input_layernorm(states)
    torch.testing.assert_close(model.model.layers[0].input_layernorm(states), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(("setting", "device", "fused"), [("auto", "cpu", 0), ("auto", "cuda", 5), (True, "cpu", 5)])
def test_auto_fuses_on_a_gpu(setting, device, fused, tmp_path):
    tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    backbone = load_backbone(ModelConfig(str(tmp_path), fused_norms=setting), device=device)  # still in main memory
    assert len(fused_norms(backbone)) == fused


def test_a_kernel_that_is_wrong_is_refused():
    model = tiny_model("llama", num_hidden_layers=2)
    fuse_norms(model)
    check_scoring(Backbone(model))
    model.model.norm.fused_norm = FusedNorm(1e-6, 1.0, keeps_dtype=False)
    with pytest.raises(ValueError, match=r"fused norms are wrong on this machine: .* set `fused_norms: false`"):
        check_scoring(Backbone(model))
