"""The operators of a forward and a backward pass, recorded on CPU, and one attention call for all packed documents."""

from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.batch import batch_to, pack_sequence
from lightning_modules.models import attention as attention_module
from lightning_modules.models import backbone as backbone_module
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.optimizations import enable_checkpointing
from tests.conftest import tiny_model
from tests.support.packing import assume_isolation

LAYERS, VOCABULARY, WIDTH = 2, 400, 32
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
WAITS = {"aten::nonzero", "aten::masked_select", "aten::masked_scatter_backward", "aten::_local_scalar_dense"}
"""Operators whose result or its shape depends on values, for which the CPU waits."""

LENGTHS = (30, 9, 17)


class Record(TorchDispatchMode):
    """Counts operators with the dtypes of their operands."""

    def __init__(self):
        super().__init__()
        self.calls, self.sums = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        name = function.name().partition(".")[0]
        operands = tensors[-2:] if name in PRODUCTS else tensors[:2]
        self.calls[name, *(tensor.dtype for tensor in operands)] += 1
        if name == "aten::add_" and tuple(tensors[0].shape) == (VOCABULARY, WIDTH):
            self.sums[tensors[0].dtype] += 1
        return function(*args, **(kwargs or {}))


def train(kind=False, precision="float32"):
    """Return what one forward and backward pass called, and the gradients."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = tiny_model(attn_implementation=register_document_attention(), dtype=dtype, num_hidden_layers=LAYERS)
    enable_checkpointing(model.train(), kind)
    backbone = assume_isolation(Backbone(model))
    generator = torch.Generator().manual_seed(0)
    batch = pack_sequence([torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        forward = Record()
        with forward:
            loss = -backbone(batch).mean()
    with Record() as backward:
        loss.backward()
    return forward, backward, {name: parameter.grad for name, parameter in backbone.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
@pytest.mark.parametrize("kind", [False, True, "selective"])
def test_products_are_in_half_precision_and_the_gradient_of_the_head_is_summed_in_float32(precision, kind):
    forward, backward, _ = train(kind, precision)
    for recorded in (forward, backward):
        called = {call for call in recorded.calls if call[0] in PRODUCTS or "dot_product" in call[0]}
        assert {name for name, *_ in called} & PRODUCTS
        assert {dtype for _, *dtypes in called for dtype in dtypes} == {torch.bfloat16}, called
    assert backward.sums == {torch.float32: 1}
    assert not WAITS & {name for name, *_ in backward.calls}, "an accelerator would have to wait for these"


def varlen_reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """`varlen_attn` for causal attention, one document at a time."""
    assert cu_seq_q is cu_seq_k
    assert max_q == max_k == max(LENGTHS)
    assert window_size == (-1, 0), "causal"
    documents = [
        F.scaled_dot_product_attention(
            *(states[None, start:stop].transpose(1, 2) for states in (query, key, value)),
            is_causal=True,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        for start, stop in pairwise(cu_seq_q.tolist())
    ]
    return torch.cat([document[0].transpose(0, 1) for document in documents])


@pytest.fixture
def at_once(monkeypatch):
    """Let the CPU use the path of the GPU for packed documents."""
    original = backbone_module.isolation_arguments

    def with_lengths(implementation, boundaries, *rest):
        lengths = torch.tensor(boundaries[0], dtype=torch.int32), max(LENGTHS)
        arguments = original(implementation, boundaries, *rest)
        arguments["document_boundaries"].packed_lengths = lengths
        return arguments

    monkeypatch.setattr(backbone_module, "isolation_arguments", with_lengths)
    monkeypatch.setattr(attention_module, "can_use_flash_attention", lambda _: True)


def older_varlen_reference(*args, scale, window_size):
    return varlen_reference(*args, scale=scale, window_size=window_size, enable_gqa=True)


@pytest.mark.parametrize("attend", [varlen_reference, older_varlen_reference])
def test_one_call_for_all_documents_equals_one_per_document(attend, request, monkeypatch):
    *_, expected = train()
    request.getfixturevalue("at_once")
    counted = mock.create_autospec(attend, side_effect=attend)
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    *_, gradients = train()
    assert counted.call_count == LAYERS
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind", [True, "selective"])
def test_selective_checkpointing_keeps_the_output_of_that_call(kind, at_once):
    def attend(query, *_):
        return query.clone(), query.new_zeros(query.shape[1], len(query)), query.new_zeros(2)

    def differentiate(grad, *states):
        return tuple(tensor.clone() for tensor in states[:3])

    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(differentiate)
    forward, backward, _ = train(kind)
    calls = Counter(name for recorded in (forward, backward) for name, *_ in recorded.calls.elements())
    assert calls["torch_attn::_varlen_attn"] == (LAYERS if kind == "selective" else 2 * LAYERS)
    assert calls["torch_attn::_varlen_attn_backward"] == LAYERS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_one_call_for_all_documents_agrees_with_one_per_document(monkeypatch):
    model = tiny_model(attn_implementation=register_document_attention(), dtype=torch.bfloat16).cuda()
    batch = batch_to(pack_sequence([torch.arange(length) for length in LENGTHS]), torch.device("cuda"))
    results = []
    for supported in (True, False):
        monkeypatch.setattr(attention_module, "can_use_flash_attention", lambda _, supported=supported: supported)
        model.zero_grad()
        log_likelihood = assume_isolation(Backbone(model))(batch)
        log_likelihood.mean().backward()
        gradients = [parameter.grad.float() for parameter in model.parameters()]
        results.append((log_likelihood, torch.cat([gradient.flatten() for gradient in gradients])))
    (at_once, gradient), (one_by_one, expected) = results
    torch.testing.assert_close(at_once, one_by_one, atol=0.1, rtol=0.02)
    assert F.cosine_similarity(gradient, expected, dim=0) > 0.999
