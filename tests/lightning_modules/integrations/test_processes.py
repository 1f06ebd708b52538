"""LongCE in several processes: DDP and FSDP2 give the weights of one process, in plain PyTorch and in trainers."""

import contextlib
import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

import longce
from lightning_modules.models.optimizations import enable_checkpointing
from tests.conftest import make_text, tiny_model
from tests.support import hf_training
from tests.support.distributed import run_distributed, run_like_torchrun
from tests.support.longce_sums import D, K, change_error, count_scored, pad, relative_error, take_steps, text

SIZES = {"context_length": 16, "stride": 8, "alpha": 0.5, "beta": -6.0}
EVALUATED = {str(seed): make_text(60 + 20 * seed, seed) for seed in range(3)}

# Of each step, the micro-batches of both processes. Texts differ in length, so processes have different windows.
STEPS = [
    [[[text(40, seed=1)], [text(25, seed=2, prompt=7)]], [[text(9, seed=3)], [text(60, seed=4), text(33, seed=5)]]],
    [[[text(14, seed=6)], [text(33, seed=7)]], [[text(50, seed=8, prompt=20)], [text(12, seed=9)]]],
]

LAYOUTS = [
    ("DDP", "linear"),
    ("DDP", "tied"),
    ("DDP", "LoRA"),
    ("plain", "linear"),
    ("plain", "tied"),
    ("accelerate", "linear"),
    ("accelerate", "tied"),
]
"""Strategies, and kinds of models."""


def make_model(kind):
    model = tiny_model("qwen2" if kind == "tied" else "llama", 90, seed=3, tie_word_embeddings=kind == "tied")
    if kind == "LoRA":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    return model.double().train()


def expected_weights(kind):
    """Weights after the steps of one process by the plain formula, in float64."""
    model = make_model(kind).eval()
    take_steps(model, [[one for process in step for batch in process for one in batch] for step in STEPS])
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
    # Then a pass of the model inside one of its passes would shard the weights of the outer one.
    fully_shard(model, reshard_after_forward=True if layout == "plain" else None)


def train(rank, world_size, strategy, kind, checkpointing):
    """Return the weights after all steps, by name."""
    model = make_model(kind)
    longce.apply_longce(model, context_length=K, stride=D)
    inner = model
    if checkpointing:
        enable_checkpointing(inner.get_base_model() if kind == "LoRA" else inner, True)
    if strategy == "DDP":
        model = DistributedDataParallel(model)
    else:
        shard(model.get_base_model() if kind == "LoRA" else model, strategy)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in STEPS:
        items = sum(count_scored(batch) for process in step for batch in process)
        for batch in step[rank]:
            # Both average the gradients over processes, for which trainers multiply the loss.
            loss = model(**pad(batch), num_items_in_batch=torch.tensor(items)).loss * world_size
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for name, weight in inner.named_parameters():
        weights[name] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
    return weights


def run_both(rank, world_size, root, model_dir):
    """Train and evaluate in all ways, in one start of the processes."""
    weights = {}
    for strategy, kind in LAYOUTS:
        for checkpointing in (False, True):
            weights[strategy, kind, checkpointing] = train(rank, world_size, strategy, kind, checkpointing)
    torch.save(weights, root / f"weights {rank}.pt")
    for sharded in (False, True):
        evaluate(rank, root, model_dir, sharded)
    dist.barrier()


@pytest.fixture(scope="module")
def both(model_dir, tmp_path_factory):
    """Return the folder of what two processes found."""
    root = tmp_path_factory.mktemp("both")
    run_distributed(run_both, root, model_dir)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("strategy", "kind"), LAYOUTS)
def test_two_processes_have_the_weights_of_one(strategy, kind, checkpointing, both):
    expected = expected_weights(kind)
    start = dict(make_model(kind).named_parameters())
    for rank in range(2):
        weights = torch.load(both / f"weights {rank}.pt")[strategy, kind, checkpointing]
        assert weights.keys() == expected.keys()
        changes = [[each[name] - start[name] for name in expected] for each in (weights, expected)]
        pairs = [pair for pair in zip(*changes, strict=True) if pair[1].norm() > 0]
        assert relative_error(*zip(*pairs, strict=True)) < 1e-9


def evaluate(rank, root, model_dir, sharded):
    """Measure a model that is in training, in processes of which one has a text less."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    longce.apply_longce(model, context_length=K, stride=D)
    if sharded:
        shard(model, "accelerate")
    ids = torch.arange(40).unsqueeze(0)
    trainer = SimpleNamespace(
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        accelerator=SimpleNamespace(autocast=contextlib.nullcontext, mixed_precision="no"),
        state=SimpleNamespace(global_step=0),
        log=lambda values: (root / f"{'FSDP2' if sharded else 'copies'} {rank}.json").write_text(json.dumps(values)),
    )
    callback = longce.LongPPLCallback(trainer, EVALUATED, str(model_dir), **SIZES)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    callback.on_evaluate(None, trainer.state, None, {}, model=model)
    model.train()(input_ids=ids, labels=ids).loss.backward()  # a pass after it is as before


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copies", "FSDP2"])
def test_the_callback_measures_with_all_processes(layout, model_dir, both):
    records = longce.score(EVALUATED, model=str(model_dir), evaluator=str(model_dir), **SIZES)
    for rank in range(2):
        values = json.loads((both / f"{layout} {rank}.json").read_text())
        assert values["eval_longppl"] == pytest.approx(longce.summarize(records).longppl, rel=1e-5)
        assert values["eval_key_tokens"] == longce.summarize(records).key_tokens > 20


@pytest.mark.slow
def test_hugging_faces_trainer_in_two_processes(model_dir, evaluator_dir, tmp_path):
    texts = [text(length, seed=seed, vocabulary=390) for seed, length in enumerate((40, 25, 9, 60, 33, 14, 50, 12))]
    start = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    start.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "model")
    arguments = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    arguments |= {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    settings = {
        "arguments": {**arguments, "eval_strategy": "epoch"},
        "texts": EVALUATED,
        "evaluator": str(evaluator_dir),
    }
    settings["rows"] = [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in texts]
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_like_torchrun(hf_training.train, tmp_path, K, D, log=tmp_path / "printed")
    expected = copy.deepcopy(start)
    losses = take_steps(expected, [texts, texts])
    for rank in range(2):
        model = copy.deepcopy(start)
        model.load_state_dict(torch.load(tmp_path / f"weights-{rank}.pt"))
        assert change_error(model, expected, start) < 1e-6
    log = json.loads((tmp_path / "log-0.json").read_text())
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, rel=1e-6)
    expected.save_pretrained(tmp_path / "model")
    records = longce.score(
        EVALUATED, model=str(tmp_path / "model"), evaluator=str(evaluator_dir), dtype="auto", **SIZES
    )
    measured = [entry["eval_longppl"] for entry in log if "eval_longppl" in entry]
    assert measured[-1] == pytest.approx(longce.summarize(records).longppl, rel=1e-5)
