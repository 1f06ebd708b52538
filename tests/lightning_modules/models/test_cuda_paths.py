"""CUDA paths on fake tensors: where the CPU waits for the device, and which kernels and dtypes it asks for."""

import contextlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data._utils.pin_memory import pin_memory

from datamodules.packing.loader import worker_options
from datamodules.packing.sequences import collate_rows, make_row
from lightning_modules.batch import batch_to, pack_sequence
from lightning_modules.functional.windows import ShortContext
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import attention as attention_module
from lightning_modules.models import backbone as backbone_module
from lightning_modules.models.attention import register_document_attention
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.context_extension.rope_types import register_rope_types
from lightning_modules.models.optimizations import use_bfloat16_residual
from lightning_modules.models.short_context import long_and_short, sliding_window_log_likelihood
from lightning_modules.models.tokenization.tokenizer import encode_document
from lightning_modules.scoring.scored_model import score_text
from tests.conftest import make_text, tiny_model
from tests.support.fake_cuda import fake_cuda, flash_attention_2
from tests.support.packing import assume_isolation

K, D, LAYERS, HEADS, KEY_HEADS, VOCABULARY = 32, 16, 2, 4, 2, 400
GPU = torch.device("cuda", 0)
SIZES = [(256, 1), (512, 4)]
"""Tokens and documents of a sequence, which have 13 and 20 windows: no number of waits below may depend on them."""


@pytest.fixture(autouse=True)
def _several_passes(monkeypatch):
    monkeypatch.setattr(backbone_module, "TOKENS_PER_PASS", 8 * (K + D))


@pytest.fixture(scope="module", autouse=True)
def _first_imports():
    """Fake tensors import sympy when they are first used."""
    with cuda_model() as (backbone, _):
        backbone(batch_to(host_batch(8, 1), GPU))


@contextlib.contextmanager
def cuda_model(precision="bf16", attention="sdpa", architecture="llama", **config):
    """Yield a model on a fake GPU, and what is recorded from then on."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(fake_cuda(pair_of=200))
        with torch.device(GPU):
            config |= {"num_hidden_layers": LAYERS, "attn_implementation": register_document_attention()}
            model = tiny_model(architecture, VOCABULARY, dtype=dtype, **config)
        if attention == "flash":
            stack.enter_context(flash_attention_2(model, recorded))
        if precision == "autocast":
            use_bfloat16_residual(model)  # as `load_backbone` does
            stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16))
        recorded.clear()
        yield assume_isolation(Backbone(model)), recorded


def host_batch(tokens, documents):
    """A batch as it leaves the loader."""
    boundaries = torch.arange(1, documents + 1) * (tokens // documents)
    return collate_rows([make_row(torch.arange(tokens).remainder(VOCABULARY).numpy(), boundaries.numpy())])


def training_module(backbone, **settings):
    module = LongContextLM(model_config={"model_type": "llama"}, context_length=K, stride=D, **settings)
    module.backbone, module._device = backbone, GPU
    module.log_dict = lambda values, **_: [module.log(name, value) for name, value in values.items()]
    module.log = lambda name, value, **_: float(value)  # as loggers and the progress bar read it
    return module


def training_step(backbone, batch, **settings):
    """Everything of an optimizer step but the backward pass and the optimizer."""
    module = training_module(backbone, **settings)
    module.training_step(batch_to(batch, GPU), 0)  # as our data modules move it
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer = SimpleNamespace(strategy=SingleDeviceStrategy(GPU), accumulate_grad_batches=1, world_size=1)
    with mock.patch.object(LongContextLM, "trainer", trainer):
        module.on_before_optimizer_step(None)


def pair_for_key_tokens(backbone, batch):
    long_and_short(backbone, batch_to(batch, GPU), ShortContext(K, D), beta=-2.0)


PATHS = {  # what runs, and how often it waits
    "training step": (training_step, 1),  # means for the log
    "pair for key tokens": (pair_for_key_tokens, 1),  # which tokens are above beta
}


@pytest.mark.parametrize(
    ("path", "attention", "precision"),  # all pairs
    [
        ("training step", "sdpa", "bf16"),
        pytest.param("training step", "flash", "autocast", marks=pytest.mark.slow),
        pytest.param("pair for key tokens", "sdpa", "autocast", marks=pytest.mark.slow),
        ("pair for key tokens", "flash", "bf16"),
    ],
)
def test_a_pass_waits_for_no_value_and_uses_fast_kernels(path, attention, precision):
    function, waits = PATHS[path]
    for tokens, documents in SIZES:
        with cuda_model(precision, attention) as (backbone, recorded):
            function(backbone, host_batch(tokens, documents))
        assert recorded.waits.total() == waits, recorded.waits
        assert not recorded.copies
        assert not recorded.masks
        kernel = "sdpa" if attention == "sdpa" else "flash varlen"
        assert {(call[0], *call[2:]) for call in recorded.attention} == {(kernel, KEY_HEADS, torch.bfloat16, True)}
        for _, columns, operands, result in recorded.products:
            wide = torch.float32 if columns == VOCABULARY else torch.bfloat16
            assert (operands, result) == (torch.bfloat16, wide)


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [("sdpa", "sdpa with mask (1, 1, 64,"), ("flash", "of 32")],
)
def test_a_short_pass_in_a_sliding_window_waits_as_little(attention, kernel):
    register_rope_types()
    for tokens, documents in SIZES:
        with cuda_model(attention=attention) as (backbone, recorded):
            training_step(backbone, host_batch(tokens, documents), short_method="sliding_window")
        assert recorded.waits.total() == 1, recorded.waits
        assert not recorded.copies
        assert not recorded.masks
        assert any(kernel in call[0] for call in recorded.attention), recorded.attention


def test_one_call_attends_within_the_windows_of_all_packed_documents(monkeypatch):
    monkeypatch.setattr(attention_module, "can_use_flash_attention", lambda params: True)
    for tokens, documents in SIZES:
        with cuda_model() as (backbone, recorded):
            batch = batch_to(host_batch(tokens, documents), GPU)
            sliding_window_log_likelihood(backbone, batch, context_length=K)
        calls = {call[0]: count for call, count in recorded.attention.items()}
        assert calls == {"varlen in a window of 32": LAYERS}
        assert not recorded.waits


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize(
    ("flash", "kernels"),
    # A block of 64 queries sees its keys by a mask of its own, and the whole of a short window without.
    [
        (True, {"sdpa", "varlen in a window of 64"}),
        (False, {"sdpa", "sdpa with mask (1, 1, 64, 64)", "sdpa with mask (1, 1, 64, 127)"}),
    ],
)
def test_a_layer_with_a_window_has_no_mask_of_all_tokens_and_waits_as_little(flash, kernels, documents, monkeypatch):
    monkeypatch.setattr(attention_module, "can_use_flash_attention", lambda params: flash)
    with cuda_model(architecture="mistral", sliding_window=64) as (backbone, recorded):
        training_step(backbone, host_batch(512, documents))
    assert recorded.waits.total() == 1, recorded.waits
    assert not recorded.masks
    assert {call[0] for call in recorded.attention} == kernels


def score(backbone, tokenizer, text, beta=None):
    score_text(text, backbone, tokenizer, ShortContext(K, D), beta=beta)


def predict(backbone, tokenizer, text):
    training_module(backbone).predict_step(batch_to(encode_document(text, tokenizer), GPU), 0)


@pytest.mark.parametrize(
    ("function", "waits"),
    [(score, 3), (partial(score, beta=-2.0), 4), (predict, 4)],  # one of a prediction is for the largest token id
)
def test_scores_of_a_text_wait_for_their_results_only(tokenizer, function, waits):
    for words in (60, 120):
        with cuda_model() as (backbone, recorded), torch.no_grad():
            function(backbone, tokenizer, make_text(words))
        assert recorded.waits.total() == waits, recorded.waits
        assert not recorded.copies


def test_a_batch_on_the_device_is_scored_without_a_wait():
    with cuda_model() as (backbone, recorded):
        batch = move_data_to_device(pack_sequence([torch.arange(256)]), GPU)
        backbone(batch)
        assert not recorded.waits
        backbone.check_batch(batch)
        assert recorded.waits.total() == 1


def test_pinning_reaches_every_tensor_of_a_batch_and_leaves_the_rest_in_main_memory(monkeypatch):
    batch, pinned = host_batch(64, 2), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: pinned.append(self) or self)
    result = pin_memory(batch)
    assert len(pinned) == 3
    moved = move_data_to_device(result, torch.device("meta"))
    assert moved["document_boundaries"] == [[0, 32, 64]]
    assert batch_to(batch, torch.device("meta"))["scored"].tolist() == batch["labels"].ge(0).tolist()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert worker_options(2)["pin_memory"]


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_one_call_attends_within_all_packed_documents(precision, monkeypatch):
    asked = []
    monkeypatch.setattr(attention_module, "can_use_flash_attention", lambda params: asked.append(params) or True)
    for tokens, documents in [(512, 4), (512, 16)]:
        with cuda_model(precision) as (backbone, recorded):
            backbone(batch_to(host_batch(tokens, documents), GPU))
        shape = (tokens, HEADS, 8)
        assert recorded.attention == {("varlen", shape, KEY_HEADS, torch.bfloat16, True): LAYERS}
        assert not recorded.waits
        assert not recorded.copies
    assert {params.query.dtype for params in asked} == {torch.bfloat16}
