"""Attention kernels against torch's attention, and each document of a sequence against itself alone."""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from lightning_modules.batch import pack_sequence
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.load import FLASH_3_KERNEL
from lightning_modules.models.optimizations import ATTENTION_OPERATORS
from tests.gpu.conftest import DEVICE, make_batch, similarity, train

pytestmark = pytest.mark.gpu
LENGTHS = (300, 45, 7, 160)


def find(attention):
    """Skip the test if a kernel is not installed."""
    packages = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if attention in packages and DEVICE.type == "cpu":
        pytest.skip(f"{attention} does not run on a CPU")
    if attention == "flash_attention_3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention-3 is for Hopper")
    if attention not in packages or importlib.util.find_spec(packages[attention]) is not None:
        return attention
    if attention == "flash_attention_3" and _has_kernel():
        return FLASH_3_KERNEL
    return pytest.skip(f"{attention} is not installed")


def _has_kernel():
    """Whether the kernel of the hub was downloaded before, and fits this machine."""
    try:
        lazy_import_flash_attention(FLASH_3_KERNEL)
    except Exception:
        return False
    return True


def test_scores_and_gradients_are_those_of_the_cpu(load):
    expected = train(load(device="cpu"), make_batch(*LENGTHS, device="cpu"))
    actual = train(load(), make_batch(*LENGTHS))
    torch.testing.assert_close(actual[0].cpu(), expected[0], atol=1e-3, rtol=1e-3)
    assert similarity(actual[1], expected[1]) > 0.99999


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "flash_attention_3"])
def test_packed_documents_score_as_they_do_alone(load, attention):
    dtype = "float32" if attention == "sdpa" else "bfloat16"
    backbone = load(find(attention), dtype)
    check_scoring(backbone)
    assert backbone.isolates_documents
    with torch.no_grad():
        packed = backbone(make_batch(*LENGTHS))
        tokens = make_batch(*LENGTHS)["input_ids"][0].split(LENGTHS)
        alone = torch.cat([backbone(pack_sequence([document])) for document in tokens], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-3 if dtype == "float32" else 0.15, rtol=0.01)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_computes_what_torch_does(load, attention):
    actual = train(load(find(attention), "bfloat16"), make_batch(*LENGTHS))
    expected = train(load("sdpa", "bfloat16"), make_batch(*LENGTHS))
    torch.testing.assert_close(actual[0], expected[0], atol=0.15, rtol=0.01)
    assert similarity(actual[1], expected[1]) > 0.999


class Count(TorchDispatchMode):
    """How often attention is computed."""

    attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attention += bool(ATTENTION_OPERATORS.fullmatch(func.name()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "flash_attention_3"])
def test_selective_checkpointing_does_not_compute_attention_again(load, attention):
    results = {}
    for kind in (False, True, "selective"):
        backbone = load(find(attention), "bfloat16", gradient_checkpointing=kind)
        with Count() as count:
            results[kind] = train(backbone, make_batch(*LENGTHS))[1]
        results[kind, "attention"] = count.attention
    assert results[True, "attention"] == 2 * results[False, "attention"] > 0
    assert results["selective", "attention"] == results[False, "attention"]
    assert similarity(results["selective"], results[True]) > 0.99999
