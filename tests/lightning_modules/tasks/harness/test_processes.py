"""Two processes share the questions out, with a copy of the model each or with half of it, and find the same."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.harness.evaluation import evaluate_tasks
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.tasks import find_names, load_tasks
from lightning_modules.training.fsdp import load_sharded_backbone, world_mesh
from tests.support.distributed import run_distributed

NAMES = ["choice", "answer", "rolling"]


def ask(backbone, model_dir, task_dir):
    config = TaskConfig(max_length=200, limit=5)
    model = HarnessModel(backbone, load_tokenizer(model_dir), config)
    found = {}
    manager, names = find_names(NAMES, task_dir)
    for name in names:
        result = evaluate_tasks(model, load_tasks(manager, name, config))
        answers = [sample["resps"] for sample in result["samples"][name]]
        found[name] = [result["results"][name], answers, result["truncated"]]
    return json.loads(json.dumps(found))


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-6)
    else:
        assert one == other


def in_each_process(rank, world_size, model_dir, task_dir, expected):
    backbone = load_backbone(ModelConfig(model_dir, dtype="float64")).eval()
    passes = []
    backbone.decoder.register_forward_hook(lambda *_: passes.append(1))
    same(ask(backbone, model_dir, task_dir), expected["found"])
    assert 0 < len(passes) < 0.8 * expected["passes"]
    config = ModelConfig(model_dir, dtype="float64")
    divided = load_sharded_backbone(config, world_mesh("cpu"), device="cpu").eval().requires_grad_(False)
    same(ask(divided, model_dir, task_dir), expected["found"])
    model = HarnessModel(backbone, load_tokenizer(model_dir), TaskConfig())
    other = Instance("loglikelihood", {}, ("ba", f" {rank}"), 0)
    with pytest.raises(ValueError, match="Processes have loaded different questions"):
        model.loglikelihood([other])


@pytest.mark.long  # processes are exchanged with in `tasks.evaluation`, too
@pytest.mark.slow
def test_two_processes_find_what_one_finds(model_dir, task_dir, record_property):
    backbone = load_backbone(ModelConfig(str(model_dir), dtype="float64")).eval()
    passes = []
    backbone.decoder.register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        found = ask(backbone, str(model_dir), str(task_dir))
    record_property("forward passes", len(passes))
    run_distributed(in_each_process, str(model_dir), str(task_dir), {"found": found, "passes": len(passes)})
