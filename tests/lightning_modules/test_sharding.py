"""The same numbers by one process and by two, whether each holds all weights (DDP) or a part of them (FSDP2)."""

import os
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch.distributed.tensor import DTensor

from callbacks import ExternalEvaluator, TokenScoresWriter
from datamodules import PG19DataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.sharding import FullyShardedStrategy
from lightning_modules.token_scores import TokenScores
from tests.conftest import make_text
from tests.distributed import run_distributed

STEPS, MICRO_BATCHES = 5, 4
VARIANTS = {
    "full": {"gradient_checkpointing": True},
    "lora": {"lora": {"r": 2, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["norm"]}},
}


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Seven documents each to validate and test on, of which some are too short for a short context."""
    folder = tmp_path_factory.mktemp("books")
    lengths = {"train": [400, 20, 350, 330], "validation": [60, 3, 80, 10, 90, 40, 70], "test": [50, 90, 2, 30, 70]}
    for split, words in lengths.items():
        (folder / split).mkdir()
        for number, count in enumerate(words):
            (folder / split / f"{number}.txt").write_text(make_text(count, seed=100 * len(split) + number))
    return folder


def make_trainer(root, processes, strategy, **settings):
    if strategy == "fsdp":
        strategy = FullyShardedStrategy(save_distributed_checkpoint=settings.pop("parts", False))
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=processes,
        inference_mode=False,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=root,
        **settings,
    )


def make_module(setup, variant="full", **settings):
    return LongContextLM(
        setup.model,
        context_length=16,
        stride=8,
        dtype="float64",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        **{**VARIANTS[variant], **settings},
    )


def make_data(setup, **settings):
    return PG19DataModule(setup.model, path=setup.books, sequence_length=96, cache_dir=setup.cache, **settings)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Losses:
    """What a module logs per step, before it is rounded to float32."""

    def __init__(self, module):
        self.values = []
        compute = module._statistics.compute

        def kept(strategy):
            sums = strategy.reduce(module._statistics._sums.clone(), reduce_op="sum")
            self.values.append((sums[0] / sums[2]).item())
            return compute(strategy)

        module._statistics.compute = kept


def train(setup, root, processes, strategy, variant):
    """Five steps with clipping and accumulation, then validation on seven documents."""
    torch.manual_seed(0)
    module, data = make_module(setup, variant), make_data(setup)
    judge = ExternalEvaluator(setup.evaluator, context_length=16, stride=8, alpha=0.5, beta=-6.0, cache_dir=str(root))
    trainer = make_trainer(
        root,
        processes,
        strategy,
        callbacks=[judge],
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_BATCHES // processes,
        gradient_clip_val=1.0,
        val_check_interval=STEPS * MICRO_BATCHES // processes,
    )
    losses = Losses(module)
    trainer.fit(module, data)
    assert len(losses.values) == STEPS
    return {
        "losses": torch.tensor(losses.values, dtype=torch.float64),
        "longppl": judge.longppl.compute().cpu(),
        "longppl_soft": judge.longppl_soft.compute().cpu(),
        "perplexity": module._perplexity.compute().cpu(),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items() if "second" not in name},
        "weights": {name: whole(tensor) for name, tensor in module.named_parameters()},
    }


def test_spike(books, model_dir, evaluator_dir, tmp_path):
    setup = SimpleNamespace(books=str(books), model=str(model_dir), evaluator=str(evaluator_dir), cache=str(tmp_path/"c"))
    for variant in VARIANTS:
        one = train(setup, tmp_path / "one", 1, "auto", variant)
        print(one["losses"], one["logged"])
        torch.save(one, tmp_path / "one.pt")
        run_distributed(_spike, setup, tmp_path, variant)

def _spike(rank, world, setup, root, variant):
    os.environ["LOCAL_RANK"] = str(rank)
    one = torch.load(root / "one.pt")
    for strategy in ("ddp", "fsdp"):
        two = train(setup, root / strategy, world, strategy, variant)
        if rank == 0:
            print(variant, strategy, (two["losses"] - one["losses"]).abs().max(), {k: two["logged"][k]-v for k,v in one["logged"].items()})
            print(max((two["weights"][n] - w).abs().max().item() for n, w in one["weights"].items()))
