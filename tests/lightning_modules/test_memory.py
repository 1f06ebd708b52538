"""What stays small at any length and vocabulary, by the bytes of living tensors."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_modules.functional import (
    linear_head,
    long_cross_entropy,
    token_log_likelihood,
)
from lightning_modules.functional.linear_head import LinearHead
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import enable_checkpointing, use_bfloat16_residual
from lightning_modules.models.short_context import long_and_short, short_log_likelihood
from lightning_modules.objectives import CrossEntropy, LongCE
from tests.conftest import tiny_model
from tests.support.memory import LiveBytes
from tests.support.packing import packed

HIDDEN, VOCABULARY = 16, 3000
HIDDEN_STATE, HEADS = 32, 4  # of `tiny_model`


def head_bytes(tokens, *, training, linear):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
    head = LinearHead(weight) if linear else lambda hidden: hidden @ weight.T
    hidden = torch.randn(1, tokens, HIDDEN, requires_grad=training)
    labels = torch.randint(VOCABULARY, (1, tokens))
    labels[:, 0] = -100
    with LiveBytes() as memory:
        if training:
            token_log_likelihood(hidden, head, labels).sum().backward()
        else:
            with torch.no_grad():
                token_log_likelihood(hidden, head, labels)
    return memory.peak


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_head_needs_a_chunk_of_logits_whatever_the_length(training, linear):
    short, long = (head_bytes(tokens, training=training, linear=linear) for tokens in (1024, 8192))
    per_token = 4 * HIDDEN * (3 if training else 1) + 64  # hidden states, their gradient, a few numbers
    assert long - short < 7168 * per_token
    chunk = 512 * VOCABULARY * 4
    weights = 4 * VOCABULARY * HIDDEN * (3 if training else 0)
    assert short < (1.2 if linear else 2.4) * chunk + weights + 1024 * per_token
    assert long < 0.25 * 8192 * VOCABULARY * 4, "full logits are far away"


@pytest.mark.parametrize(
    "checkpointing", [False, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (True, "selective"))]
)
def test_a_longce_step_needs_no_more_than_a_ce_step(checkpointing):
    backbone = Backbone(tiny_model("llama", 400, num_hidden_layers=4).train())
    enable_checkpointing(backbone.base_model, checkpointing)
    batch = packed([torch.arange(1500) % 400])

    def peak(objective):
        with LiveBytes() as memory:
            short = None
            if objective.uses_short_context:
                short = short_log_likelihood(backbone, batch, ShortContext(128, 64))
            long = backbone(batch)
            long_cross_entropy(long, objective(long.detach(), short, batch), batch["labels"]).backward()
        backbone.zero_grad()
        return memory.peak

    assert peak(LongCE()) < 1.02 * peak(CrossEntropy())


@pytest.mark.slow
def test_scoring_grows_by_one_layer_of_one_pass():
    def peak(tokens, layers):
        backbone = Backbone(tiny_model("llama", 400, num_hidden_layers=layers).eval())
        with LiveBytes() as memory:
            long_and_short(backbone, packed([torch.arange(tokens) % 400]), ShortContext(128, 64))
        return memory.peak

    assert peak(2048, 6) < 1.05 * peak(2048, 2)
    assert peak(4096, 2) < 2.1 * peak(2048, 2)


def test_under_autocast_the_copies_of_the_weights_do_not_add_up():
    def peak(layers, checkpointing):
        backbone = Backbone(tiny_model("llama", 400, hidden_size=128, num_hidden_layers=layers).train())
        enable_checkpointing(backbone.base_model, checkpointing)
        weights = sum(p.numel() for p in backbone.decoder.layers.parameters())
        with LiveBytes() as memory, torch.autocast("cpu", torch.bfloat16):
            backbone(packed([torch.arange(20)]))
        return memory.peak, 2 * weights

    (few, few_copies), (many, many_copies) = peak(2, True), peak(8, True)
    assert many - few < 0.3 * (many_copies - few_copies)
    (few, _), (many, _) = peak(2, False), peak(8, False)
    assert many - few > many_copies - few_copies, "the backward pass needs them"


class HostBytes(torch.autograd.graph.save_on_cpu):
    """Torch's hooks, which on a machine without GPU copy to ordinary memory; counts what they keep."""

    kept = 0

    def __init__(self, **settings):
        super().__init__(**settings)
        pack = self.pack_hook

        def count(tensor):
            HostBytes.kept += tensor.nbytes
            return pack(tensor)

        self.pack_hook = count


def kept_by_layers(monkeypatch, *, checkpointing=True, residual="float32", offload=False, autocast=torch.bfloat16):
    """Bytes per token and layer that the forward pass keeps for the backward pass, on the device and on the host."""
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", HostBytes)

    def kept(layers):
        backbone = Backbone(tiny_model("llama", 400, num_hidden_layers=layers).train())
        enable_checkpointing(backbone.base_model, checkpointing, offload=offload)
        if residual == "bfloat16":
            use_bfloat16_residual(backbone.decoder)
        HostBytes.kept = 0
        with LiveBytes() as memory, torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            output = backbone(packed([torch.arange(500) % 400]))
            live = memory.live
        assert output.requires_grad
        return live - HostBytes.kept, HostBytes.kept

    return tuple((many - few) / (4 * 500) for few, many in zip(kept(2), kept(6), strict=True))


@pytest.mark.parametrize(
    ("residual", "autocast", "size"),
    [
        ("float32", torch.bfloat16, 4),
        ("bfloat16", torch.bfloat16, 2),
        ("bfloat16", torch.float16, 4),
        ("bfloat16", None, 4),
    ],
)
def test_checkpointing_keeps_layer_inputs_in_the_dtype_of_the_residual_stream(residual, autocast, size, monkeypatch):
    assert kept_by_layers(monkeypatch, residual=residual, autocast=autocast) == (size * HIDDEN_STATE, 0)


def test_each_layer_that_is_not_checkpointed_keeps_the_same():
    kept = []
    for layers in (1, 2, 3, None):
        model = tiny_model("llama", 400, num_hidden_layers=4).train()
        enable_checkpointing(model, True, layers=layers)
        with LiveBytes() as memory:
            output = Backbone(model)(packed([torch.arange(500) % 400]))
            kept.append(memory.live)
        assert output.requires_grad
    differences = [more - less for more, less in pairwise(kept)]
    assert differences[0] == differences[1] == differences[2] > 10 * 500 * 4 * HIDDEN_STATE


@pytest.mark.parametrize(("checkpointing", "on_device"), [(True, 0), ("selective", 2 * HIDDEN_STATE + 4 * HEADS)])
def test_offloaded_layer_inputs_are_on_the_host_only(checkpointing, on_device, monkeypatch):
    kept = kept_by_layers(monkeypatch, checkpointing=checkpointing, residual="bfloat16", offload=True)
    assert kept == (on_device, 2 * HIDDEN_STATE), "selective: attention's output, and a float32 per token and head"


@pytest.mark.parametrize("training", [True, False])
def test_where_half_precision_is_multiplied_into_float32_there_is_one_chunk_as_well(training, monkeypatch):
    """As on a GPU, with a stand-in for its product."""
    monkeypatch.setattr(linear_head, "_multiplies_into_float32", lambda operand: operand.dtype == torch.bfloat16)
    monkeypatch.setattr(linear_head, "_multiply_into_float32", lambda left, right: left.float() @ right.float())
    monkeypatch.setattr(linear_head, "TILE_ELEMENTS_CPU", 512 * VOCABULARY // 3)
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN).bfloat16())
    hidden = torch.randn(1, 4096, HIDDEN).bfloat16().requires_grad_(training)
    labels = torch.randint(VOCABULARY, (1, 4096))
    labels[:, 0] = -100
    with LiveBytes() as memory:
        if training:
            token_log_likelihood(hidden, LinearHead(weight), labels).sum().backward()
        else:
            with torch.no_grad():
                token_log_likelihood(hidden, LinearHead(weight), labels)
    chunk = 512 * VOCABULARY * 4
    # In training a whole chunk, and its slope in half precision for the products; else a tile.
    assert memory.peak < (1.75 * chunk if training else 1.25 * chunk / 3) + 4096 * HIDDEN * 8
