"""The rows of the GPU benchmark on a GPU of fake tensors: everything but the backward pass and time."""

from unittest import mock

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from benchmarks.gpu import cases, checks, timing
from benchmarks.on_gpu import TINY
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import backbone
from tests.support.fake_cuda import fake_cuda

NAMES = [
    "8B, bf16: LongPPL",
    pytest.param("8 layers, fp32 + autocast: LongCE", marks=pytest.mark.slow),
    pytest.param("8B, bf16: pass", marks=pytest.mark.slow),
    pytest.param("8 layers, bf16: the authors' step", marks=pytest.mark.slow),
]


@pytest.fixture
def tiny_on_cuda(monkeypatch):
    def to(module, device):
        module._device = torch.device(device, 0)
        return module

    monkeypatch.setattr(timing, "make_config", lambda llama, layers, _: cases.make_config(llama, layers, "cpu"))
    # Fake tensors have no memory to pin.
    monkeypatch.setattr(timing, "batch_to", lambda batch, _: move_data_to_device(batch, torch.device("cuda", 0)))
    monkeypatch.setattr(LongContextLM, "to", to)  # fake tensors cannot be swapped
    monkeypatch.setattr(backbone, "TOKENS_PER_PASS", 320)


@pytest.mark.parametrize("name", NAMES)
def test_rows_run_on_a_device(name, tiny_on_cuda):
    with fake_cuda() as recorded:
        run = timing.make_run(cases.CASES[name], TINY, "cuda")
        if run.func is timing._score:
            run()
        else:
            module, loss, _, device, autocast = run.args
            with checks.half_precision(device, autocast=autocast):
                assert loss().device.type == "cuda"
            assert module.backbone.device.type == "cuda"
        assert {dtype for *_, dtype, _ in recorded.attention} == {torch.bfloat16}


def test_checks_build_their_models_on_the_device(tiny_on_cuda):
    with fake_cuda():
        module = checks.build_module("cuda", model_config=checks.SIZES, **checks.WINDOWS)
    assert {each.device.type for each in (*module.backbone.parameters(), *module.backbone.buffers())} == {"cuda"}
    with pytest.raises(checks.NotAvailableError, match="context_length"):
        checks.build_module("cpu", optional=True, context_length=0, model_config=checks.SIZES)
    bug = mock.patch.object(checks, "load_backbone", side_effect=ValueError("a bug"))
    with bug, pytest.raises(ValueError, match="a bug"):
        checks.build_module("cpu", model_config=checks.SIZES)
