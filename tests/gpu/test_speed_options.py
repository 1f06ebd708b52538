"""Options that make a step faster, against the plain step: torch.compile, DDP and FSDP2 on one device."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.short_context import short_log_likelihood
from lightning_modules.training.fsdp import load_sharded_backbone
from tests.gpu.conftest import DEVICE, make_batch, similarity, train

pytestmark = pytest.mark.gpu
SHORT = ShortContext(64, 32)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_layers_compute_the_same_and_are_compiled_a_few_times(load, checkpointing):
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (load(gradient_checkpointing=checkpointing, compile=each) for each in (False, True))
    graphs = []
    for lengths in ((256,), (200, 40), (300,), (90, 80, 70), (130,), (50, 60, 70, 80, 90)):
        actual, expected = (train(backbone, make_batch(*lengths)) for backbone in (compiled, plain))
        torch.testing.assert_close(actual[0], expected[0], atol=1e-3, rtol=1e-3)
        assert similarity(actual[1], expected[1]) > 0.99999
        batch = make_batch(*lengths)
        short = [short_log_likelihood(backbone, batch, SHORT)[0] for backbone in (compiled, plain)]
        torch.testing.assert_close(*short, atol=1e-3, rtol=1e-3)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[2] == graphs[-1], graphs


@pytest.fixture
def process_group(tmp_path):
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_ddp_computes_the_same_gradients(load, process_group, compiled):
    torch._dynamo.reset()
    expected = train(load(), make_batch(200, 100))
    backbone = load(compile=compiled)
    wrapped = DistributedDataParallel(backbone, device_ids=[0] if DEVICE.type == "cuda" else None)
    log_likelihood = wrapped(make_batch(200, 100))
    log_likelihood.mean().backward()
    torch.testing.assert_close(log_likelihood.detach(), expected[0], atol=1e-3, rtol=1e-3)
    gradients = {name: parameter.grad for name, parameter in backbone.named_parameters()}
    assert similarity(gradients, expected[1]) > 0.99999


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointing", [False, "selective"])
def test_fsdp2_computes_the_same_gradients(load, folder, process_group, compiled, checkpointing):
    torch._dynamo.reset()
    expected = train(load(), make_batch(200, 100))
    mesh = dist.device_mesh.init_device_mesh(DEVICE.type, (1,))
    config = ModelConfig(
        folder, attn_implementation="sdpa", gradient_checkpointing=checkpointing, compile=compiled, dtype="float32"
    )
    backbone = load_sharded_backbone(config, mesh, device=DEVICE).train()
    for _ in range(2):  # the second pass gathers weights again
        backbone.zero_grad()
        log_likelihood = backbone(make_batch(200, 100))
        log_likelihood.mean().backward()
    torch.testing.assert_close(log_likelihood.detach(), expected[0], atol=1e-3, rtol=1e-3)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in backbone.named_parameters()}
    assert similarity(gradients, expected[1]) > 0.99999
