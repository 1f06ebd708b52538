"""Models for the tests on a GPU: ``pytest tests/gpu``.

``LONGCE_GPU_TESTS_ON=cpu`` rehearses them on a CPU, where tests of kernels for CUDA are skipped.
"""

import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.batch import batch_to, pack_sequence
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone

DEVICE = torch.device(os.environ.get("LONGCE_GPU_TESTS_ON", "cuda"))
VOCABULARY = 512


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device, or LONGCE_GPU_TESTS_ON=cpu for a rehearsal")
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and DEVICE.type == "cuda" and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def exact_products():
    """Without TF32, which rounds the products of float32 to 10 bits."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.08,
    )
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture
def load(folder):
    def load(attention="sdpa", dtype="float32", device=DEVICE, **settings):
        config = ModelConfig(folder, dtype=dtype, attn_implementation=attention, **settings)
        return load_backbone(config, device=device).to(device).train()

    return load


def make_batch(*lengths, device=DEVICE):
    generator = torch.Generator().manual_seed(sum(lengths))
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    return batch_to(pack_sequence(documents), torch.device(device))


def train(backbone, batch):
    """Return log-likelihoods and gradients."""
    backbone.zero_grad()
    log_likelihood = backbone(batch)
    log_likelihood.mean().backward()
    gradients = {name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None}
    return log_likelihood.detach(), gradients


def similarity(gradients, expected):
    """Return the cosine of all gradients."""
    parts = [torch.cat([each[name].flatten().double().cpu() for name in expected]) for each in (gradients, expected)]
    return torch.nn.functional.cosine_similarity(*parts, dim=0).item()
