"""FlashAttention-3, and flash attention from the `kernels` hub, on the CPU with a kernel of the same signatures."""

import pytest
import torch

from lightning_modules.models.loading import load as loading
from lightning_modules.models.loading.checks import check_scoring
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import (
    FLASH_3_KERNEL,
    choose_attention,
    load_backbone,
    load_config,
    register_attention,
)
from lightning_modules.models.optimizations import ATTENTION_OPERATORS
from tests.conftest import tiny_config, tiny_model
from tests.support import flash_kernel
from tests.support.operators import OperatorCounts
from tests.support.packing import assume_isolation, documents, packed

PACKED = packed(documents(30, 8), documents(20, 18))


def load(folder, attention, checkpointing=False):
    tiny_model("llama").save_pretrained(folder)
    config = ModelConfig(
        str(folder), dtype="bfloat16", attn_implementation=attention, gradient_checkpointing=checkpointing
    )
    return assume_isolation(load_backbone(config)).train()


def test_documents_of_several_sequences_are_isolated_with_a_kernel_of_the_hub(tmp_path, monkeypatch):
    backbone = load(tmp_path, flash_kernel.install(monkeypatch))
    assert backbone.attention == FLASH_3_KERNEL
    check_scoring(backbone)
    assert backbone.isolates_documents
    with torch.no_grad():
        torch.testing.assert_close(backbone(PACKED), load(tmp_path, "sdpa")(PACKED), atol=0.1, rtol=0.05)


def test_selective_checkpointing_keeps_what_the_kernel_computes(tmp_path, monkeypatch):
    results = {}
    for kind in (False, True, "selective"):
        backbone = load(tmp_path, flash_kernel.install(monkeypatch), kind)
        with OperatorCounts() as counts:
            backbone(PACKED).mean().backward()
        attention = counts.calls[f"{flash_kernel.NAMESPACE}::_flash_attn_forward"]
        results[kind] = attention, [parameter.grad for parameter in backbone.parameters()]
    assert [results[kind][0] for kind in (False, True, "selective")] == [2, 4, 2]
    for actual, expected in zip(results["selective"][1], results[True][1], strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        ("flash_attn_3::_flash_attn_forward", True),
        ("flash_attn_3::fwd", True),
        ("flash_attn_3::_flash_attn_backward", False),
        ("_vllm_flash_attn3_cuda_9aa33c0::fwd", True),
        ("_flash_attn2_2e75662::_flash_attn_varlen_forward", True),
        ("_activation_2e75662::fwd", False),
        ("aten::mm", False),
    ],
)
def test_operators_of_packages_and_of_the_hub_are_recognized(operator, kept):
    assert bool(ATTENTION_OPERATORS.fullmatch(operator)) == kept


def test_a_kernel_that_looks_ahead_is_refused(tmp_path, monkeypatch):
    def looks_ahead(*args, causal=False, **kwargs):
        return flash_kernel.flash_attn_func(*args, causal=False, **kwargs)

    backbone = load(tmp_path, flash_kernel.install(monkeypatch, flash_attn_func=looks_ahead))
    with pytest.raises(ValueError, match=r"kernel '.*flash-attn3' is wrong.*`attn_implementation`"):
        check_scoring(backbone)


def choose(monkeypatch, packages, capability=(9, 0), implementation="auto", config=None):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in packages or None)
    config, settings = config or tiny_config(), ModelConfig(attn_implementation=implementation, dtype="bfloat16")
    return register_attention(choose_attention(settings, config, device="cuda"), config)


@pytest.mark.parametrize(
    ("packages", "capability", "chosen"),
    [
        (["flash_attn", "flash_attn_interface"], (9, 0), "flash_attention_3"),
        (["flash_attn", "flash_attn_interface"], (8, 0), "flash_attention_2"),
        (["flash_attn", "flash_attn_interface"], (10, 0), "flash_attention_2"),
        (["flash_attn"], (9, 0), "flash_attention_2"),
        ([], (9, 0), "document_sdpa"),
    ],
)
def test_auto_prefers_flash_attention_3_on_hopper(monkeypatch, packages, capability, chosen):
    assert choose(monkeypatch, packages, capability) == chosen


def test_without_the_package_flash_attention_3_is_the_kernel_that_has_gradients(monkeypatch):
    flash_kernel.install(monkeypatch)
    assert choose(monkeypatch, [], implementation="flash_attention_3") == FLASH_3_KERNEL


def test_a_kernel_of_the_hub_needs_the_package_kernels(monkeypatch):
    monkeypatch.setattr(loading, "is_kernels_available", lambda: False)
    with pytest.raises(ValueError, match=r"`attn_implementation: kernels-community/flash-attn3` needs flash-attn"):
        choose(monkeypatch, [], implementation="flash_attention_3")


def test_eabf_uses_the_package_and_refuses_the_hub(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path)
    kernel = flash_kernel.install(monkeypatch)
    extension = {"method": "eabf", "original_length": 4096, "target_length": 8192}
    settings = ModelConfig(str(tmp_path), context_extension=extension, attn_implementation=kernel)
    with pytest.raises(ValueError, match="'eabf' does not support 'kernels-community/flash-attn3'"):
        load_backbone(settings)
    assert choose(monkeypatch, ["flash_attn_interface"], config=load_config(settings)) == "flash_attention_3"
    assert choose(monkeypatch, ["flash_attn"], config=load_config(settings)) == "flash_attention_2"
