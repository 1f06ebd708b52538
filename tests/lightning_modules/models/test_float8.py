"""The short pass in float8: products, lifetime of the rounded weights, and what must stay exact."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import Float8Layers, Float8Linear, compile_layers, short_precision
from lightning_modules.models.short_context import short_log_likelihood
from tests.conftest import tiny_model
from tests.lightning_modules.models.test_backbone import documents, packed
from tests.support import reference

BATCH = packed(documents(60), documents(50, 10))


def score(backbone, layers, step=0):
    with short_precision(torch.device("cpu"), "float8"), layers.replace(backbone.decoder, step):
        return short_log_likelihood(backbone, BATCH, context_length=16, stride=8)[0]


@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_rounded_tokens_and_weights(bias):
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=bias)
    inputs = torch.randn(2, 5, 48) * torch.logspace(-3, 3, 5)[:, None]  # tokens of different sizes
    actual = Float8Linear(linear)(inputs)
    expected = reference.float8_linear(inputs, linear.weight, linear.bias)
    torch.testing.assert_close(actual.double(), expected, atol=1e-3 if bias else 1e-6, rtol=0.01)
    assert 0.005 < (expected - linear(inputs)).norm() / expected.norm() < 0.05, "rounding to 3 bits is not exact"
    assert Float8Linear(linear)(torch.zeros(1, 48)).isfinite().all()


def test_weights_are_rounded_once_per_optimizer_step(monkeypatch):
    backbone, layers, rounded = Backbone(tiny_model()), Float8Layers(), []
    monkeypatch.setattr(Float8Linear, "__init__", count_calls(Float8Linear.__init__, rounded))
    before = score(backbone, layers)
    assert len(rounded) == 2 * 7, "all linear layers of two decoder layers, and not the head"
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=0.1, fused=True)  # does not increase `weight._version`
    for weight in backbone.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    score(backbone, layers)
    assert len(rounded) == 2 * 7, "the next batch of the same step"
    assert not torch.equal(score(backbone, layers, step=1), before)
    assert len(rounded) == 4 * 7


def count_calls(function, calls):
    def counted(*args):
        calls.append(args)
        function(*args)

    return counted


def test_the_model_is_as_before_even_after_an_error():
    backbone = Backbone(tiny_model())
    state, modules = backbone.state_dict(), list(backbone.modules())

    def fail():
        with Float8Layers().replace(backbone.decoder, 0):
            assert list(backbone.modules()) != modules
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(backbone.modules()) == modules
    assert all(tensor.data_ptr() == state[name].data_ptr() for name, tensor in backbone.state_dict().items())


def test_adapters_keep_their_precision():
    model = get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", r=16))
    backbone = Backbone(model)
    with Float8Layers().replace(backbone.decoder, 0):
        kinds = {name: type(module) for name, module in backbone.decoder.named_modules()}
    assert kinds["layers.0.self_attn.q_proj.base_layer"] is Float8Linear
    assert kinds["layers.0.self_attn.q_proj.lora_A.default"] is nn.Linear
    assert score(backbone, Float8Layers()).isfinite().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_compute_the_same_in_float8_and_are_not_compiled_for_each_step():
    torch._dynamo.reset()
    plain, compiled = Backbone(tiny_model()), Backbone(tiny_model())
    graphs, counts, layers = [], [], Float8Layers()
    compile_layers(compiled.decoder, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for step in range(4):
        torch.testing.assert_close(score(compiled, layers, step), score(plain, Float8Layers()))
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[3] == counts[0]
