"""FLOPs and memory of Llama-3.1-8B and 70B, computed by hand from the published sizes."""

from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig

from longce.plan.hardware import GPUS, Rates
from longce.plan.memory import Training
from longce.plan.plan import Planner
from longce.plan.settings import Experiment

T, K, D, V = 32_768, 4096, 1024, 128_256  # tokens, short context, stride, vocabulary
GIB = 2**30


class Llama(NamedTuple):
    """Sizes of the Llama 3.1 report (https://arxiv.org/abs/2407.21783, Table 3)."""

    layers: int
    h: int  # hidden size, also of all query heads together
    f: int  # intermediate size
    heads: int
    kv: int = 1024  # 8 key-value heads of 128
    parameters: int = 0  # of the released weights

    @property
    def layer(self):
        """Weights of a layer: query and output, key and value, gate, up and down."""
        return 2 * self.h * self.h + 2 * self.h * self.kv + 3 * self.h * self.f

    def forward(self, tokens, scored):
        """Two FLOPs per weight and token; causal attention: half of two products of tokens x tokens x h."""
        gemm = 2 * tokens * self.layers * self.layer + 2 * scored * V * self.h
        return gemm + self.layers * 2 * tokens**2 * self.h

    def plan(self, dtype, autocast, **settings):
        sizes = {"hidden_size": self.h, "intermediate_size": self.f, "num_hidden_layers": self.layers}
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": 8, "vocab_size": V}
        config = AutoConfig.for_model("llama", **sizes, **heads, dtype="bfloat16")
        training = Training(T, dtype=dtype, autocast=autocast, checkpointing="full", step_copy=False, **settings)
        experiment = Experiment("llama", config, None, "LongCE", training)
        return Planner(experiment, GPUS["H200"], Rates()).plan()


LLAMAS = {
    "8B": Llama(32, 4096, 14336, 32, parameters=8_030_261_248),
    "70B": Llama(80, 8192, 28672, 64, parameters=70_553_706_496),
}


@pytest.fixture(scope="module", params=["8B", "70B"])
def planned(request):
    """8B on one GPU, all in bfloat16; 70B on 64 GPUs with FSDP2, in mixed precision."""
    llama = LLAMAS[request.param]
    if request.param == "8B":
        return llama, llama.plan(torch.bfloat16, None)
    return llama, llama.plan(torch.float32, torch.bfloat16, sharded=True, gpus=64)


def test_parameters(planned):
    llama, numbers = planned
    # Two norms per layer and one at the end; embedding and head.
    assert numbers["model"]["parameters"] == llama.layers * (llama.layer + 2 * llama.h) + llama.h + 2 * V * llama.h
    assert numbers["model"]["parameters"] == llama.parameters


def test_flops(planned):
    llama, numbers = planned
    # Forward, recomputed, and twice as much backward: 4. Attention: 1 + 1 + 2.5 (flash attention). Head: logits, logits
    # again, gradients of hidden states and weights: 4.
    attention = llama.layers * 2 * T**2 * llama.h
    step = 4 * 2 * T * llama.layers * llama.layer + (1 + 1 + 2.5) * attention + 4 * 2 * T * V * llama.h
    # Windows of K + d tokens that begin at d, 2d, ..; each scores its last d tokens.
    windows = (T - K) // D - 1
    short = windows * llama.forward(K + D, D)
    ce, configured = (row["tflop"] for row in numbers["training"][:2])
    assert ce == pytest.approx(step / 1e12, rel=0.01)
    assert configured - ce == pytest.approx(short / 1e12, rel=0.01)
    if llama.layers == 32:
        assert [round(each / 1e12) for each in (step, short)] == [3234, 2144]


def test_memory(planned):
    llama, numbers = planned
    # Weights, gradients and two moments, in bfloat16; or in float32 on 64 GPUs, with two gathered layers, embedding and
    # head in bfloat16. Everything else is bfloat16.
    states = 4 * llama.parameters * 2
    if llama.layers == 80:
        states = 4 * llama.parameters * 4 / 64 + 2 * (2 * llama.layer + 2 * V * llama.h)
    inputs = T * llama.layers * 2 * llama.h
    hidden = 3 * T * 2 * llama.h  # last hidden states, their copy, and their gradient
    # One layer is recomputed and kept in the backward pass. Two norms: a float32 input, normalized, times the weight.
    norms = 2 * (4 + 2 + 2) * llama.h
    attention = 2 * 2 * llama.h + 2 * 2 * llama.kv  # query, output, key, value
    mlp = 4 * 2 * llama.f  # gate, up, activation of the gate, and its product with up
    gradients = 2 * llama.h + 2 * 2 * llama.f  # of the output and of two factors of that product
    layer = T * (norms + attention + mlp + gradients)
    expected = (states + inputs + hidden + layer) / GIB
    assert numbers["memory"]["largest_phase"] == "backward pass"
    assert numbers["memory"]["peak"] == pytest.approx(expected, rel=0.05)
    parts = numbers["memory"]["phases"]["backward pass"]
    assert parts["activations kept for the backward pass"] == pytest.approx(inputs / GIB)
    assert parts["one layer's backward pass"] == pytest.approx(layer / GIB, rel=0.1)
