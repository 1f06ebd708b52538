"""LongCE in several processes: DDP and FSDP2 give the weights of one process, in plain PyTorch and in trainers."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import longce
from lightning_modules.batch import IGNORE_INDEX
from tests.conftest import tiny_model
from tests.support.distributed import run_distributed
from tests.support.longce_sums import D, K, longce_sum, pad, relative_error, text

# Of each step, the micro-batches of both processes. Texts differ in length, so processes have different windows.
STEPS = [
    [[[text(40, seed=1)], [text(25, seed=2, prompt=7)]], [[text(9, seed=3)], [text(60, seed=4), text(33, seed=5)]]],
    [[[text(14, seed=6)], [text(33, seed=7)]], [[text(50, seed=8, prompt=20)], [text(12, seed=9)]]],
]


def make_model(kind):
    model = tiny_model("qwen2" if kind == "tied" else "llama", 90, seed=3, tie_word_embeddings=kind == "tied")
    if kind == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    return model.double().train()


def count(texts):
    return sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in texts)


def expected_weights(kind):
    """Weights after the steps of one process by the plain formula, in float64."""
    model = make_model(kind).eval()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in STEPS:
        texts = [one for process in step for batch in process for one in batch]
        loss = sum(longce_sum(model, *one) for one in texts) / count(texts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def shard(model, layout):
    """As a plain program does, or as accelerate, which also shards embedding, norm and head by themselves."""
    for layer in model.model.layers:
        fully_shard(layer)
    if layout == "accelerate":
        if model.lm_head.weight is model.model.embed_tokens.weight:
            fully_shard([model.model.norm, model.model.embed_tokens, model.lm_head], reshard_after_forward=False)
        else:
            fully_shard(model.model.embed_tokens)
            fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
    fully_shard(model)


def train(rank, world_size, root, strategy, kind, checkpointing):
    model = make_model(kind)
    longce.apply_longce(model, context_length=K, stride=D)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    inner = model
    if strategy == "DDP":
        model = DistributedDataParallel(model)
    else:
        shard(model.get_base_model() if kind == "LoRA" else model, strategy)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in STEPS:
        items = sum(count(batch) for process in step for batch in process)
        for batch in step[rank]:
            # Both average the gradients over processes, for which trainers multiply the loss.
            loss = model(**pad(batch), num_items_in_batch=torch.tensor(items)).loss * world_size
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for name, weight in inner.named_parameters():
        weights[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
    torch.save(weights, root / f"{rank}.pt")
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("DDP", "linear"),
        ("DDP", "tied"),
        ("DDP", "LoRA"),
        ("plain", "linear"),
        ("plain", "tied"),
        ("accelerate", "linear"),
        ("accelerate", "tied"),
    ],
)
def test_two_processes_have_the_weights_of_one(strategy, kind, checkpointing, tmp_path):
    run_distributed(train, tmp_path, strategy, kind, checkpointing)
    expected = expected_weights(kind)
    start = dict(make_model(kind).named_parameters())
    for rank in range(2):
        weights = torch.load(tmp_path / f"{rank}.pt")
        assert weights.keys() == expected.keys()
        changes = [[each[name] - start[name] for name in expected] for each in (weights, expected)]
        pairs = [pair for pair in zip(*changes, strict=True) if pair[1].norm() > 0]
        assert relative_error(*zip(*pairs, strict=True)) < 1e-9
