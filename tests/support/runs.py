"""Training and evaluation of a tiny model by any strategy, with all that must not depend on it."""

import torch
from torch.distributed.tensor import DTensor

from callbacks import ExternalEvaluator, TokenScoresWriter
from datamodules import PG19DataModule
from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.scoring.token_scores import TokenScores
from lightning_modules.training.fsdp import FullyShardedStrategy
from tests.support.trainers import quiet_trainer

STEPS, MICRO_BATCHES = 5, 4
TIMES = {f"train/{name}" for name in ("tokens_per_second", "gpu_hours", "data_wait")}
VARIANTS = {
    "full": {"gradient_checkpointing": True},
    "lora": {"lora": {"r": 2, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["norm"]}},
}


def logged_values(trainer):
    """The logged values, except those that depend on the speed of the machine."""
    values = trainer.callback_metrics.items()
    return {name: float(value) for name, value in values if name not in TIMES and "second" not in name}


def make_trainer(root, processes, strategy, **settings):
    if strategy in ("fsdp", "offload"):
        parts = settings.pop("parts", False)
        strategy = FullyShardedStrategy(save_distributed_checkpoint=parts, offload=strategy == "offload")
    settings = {"inference_mode": False, "num_sanity_val_steps": 1, **settings}
    return quiet_trainer(root, *settings.pop("callbacks", ()), strategy=strategy, devices=processes, **settings)


def make_module(setup, variant="full", **settings):
    return LongContextLM(
        setup.model,
        context_length=16,
        stride=16,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        **{"dtype": "float64", **VARIANTS[variant], **settings},
    )


def make_data(setup, **settings):
    return PG19DataModule(setup.model, path=setup.books, sequence_length=64, cache_dir=setup.cache, **settings)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Losses:
    """What a module logs per step, before it is rounded to float32."""

    def __init__(self, module):
        self.values = []
        compute = module._statistics.compute

        def kept(strategy, norm, copies=1):
            sums = strategy.reduce(module._statistics._sums.clone(), reduce_op="sum")
            self.values.append((sums[0] / sums[2]).item())
            return compute(strategy, norm, copies=copies)

        module._statistics.compute = kept


def leave_out_labels(module):
    """Learn other numbers of tokens from each row, so that a mean over tokens is no mean of rows' means."""
    step = module.training_step

    def uneven(batch, batch_idx):
        for labels in batch["labels"]:
            labels[8 + int(labels[1]) % 50 :] = IGNORE_INDEX
        return step(with_scored(batch), batch_idx)

    module.training_step = uneven


def train(setup, root, processes, strategy, variant, *, uneven=False, **settings):
    """Five steps with clipping and accumulation, then validation on seven documents."""
    torch.manual_seed(0)
    module, data = make_module(setup, variant, **settings), make_data(setup)
    if uneven:
        leave_out_labels(module)
    judge = ExternalEvaluator(setup.evaluator, context_length=16, stride=16, alpha=0.5, beta=-6.0, cache_dir=str(root))
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
        "longppl": trainer.callback_metrics["val/longppl"],
        "longppl_soft": trainer.callback_metrics["val/longppl_soft"],
        "perplexity": module._perplexities[""].compute().cpu(),
        "logged": logged_values(trainer),
        "weights": {name: whole(tensor) for name, tensor in module.named_parameters()},
    }


def evaluate(setup, root, processes, strategy, documents, *, sharded=False, **settings):
    """Test and prediction of some documents, each with a cache of its own unless the evaluator is divided."""
    module, data = make_module(setup, **settings), make_data(setup, test_documents=documents)
    key_tokens = {"context_length": 16, "stride": 16, "alpha": 0.5, "beta": -6.0, "sharded": sharded}
    judge = ExternalEvaluator(setup.evaluator, cache_dir=str(root / f"{strategy} {documents}"), **key_tokens)
    folder = root / f"{strategy} {documents} predicted"
    trainer = make_trainer(root, processes, strategy, callbacks=[judge, TokenScoresWriter(str(folder))])
    (logged,) = trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    trainer.strategy.barrier()
    scores = {path.stem: TokenScores.load(path) for path in folder.iterdir()}
    pairs = {name: torch.stack([pair.long, pair.short]) for name, pair in scores.items()}
    return {
        "logged": logged,
        "longppl": torch.tensor(logged["test/longppl"]),
        "longppl_soft": torch.tensor(logged["test/longppl_soft"]),
        "perplexity": module._perplexities[""].compute().double().cpu(),
        "pairs": pairs,
    }


def assert_same(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol, equal_nan=True)
