"""One table of training steps, strategy x precision x kind of head x kind of objective, against plain float64 sums."""

import copy
import os

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_modules.batch import IGNORE_INDEX, with_scored
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.attention import register_document_attention
from lightning_modules.objectives import (
    CrossEntropy,
    Interpolated,
    LongCE,
    MutualInformation,
    Normalized,
    Objective,
    Sparse,
)
from lightning_modules.training.fsdp import FullyShardedStrategy
from lightning_modules.training.sequence_parallel import UlyssesStrategy
from tests.conftest import tiny_model
from tests.lightning_modules.test_long_context_lm import Recorder
from tests.support import reference
from tests.support.distributed import run_distributed
from tests.support.tiny_training import LENGTH, VOCABULARY, loader, row, trainer

K, D = 8, 4


class RankInSequence(Objective):
    """A weighting that is wrong unless it sees whole sequences: the rank of a token in its sequence."""

    uses_short_context = False

    def token_weights(self, long, short, batch):
        scored = batch["labels"].ne(IGNORE_INDEX)
        return _rank(long.masked_fill(~scored, torch.inf)) / 10


def _rank(values):
    return values.argsort(-1).argsort(-1).to(values.dtype)


def _sparse(long, short, scored, fraction):
    size = (long - short).abs().masked_fill(~scored, 0)
    chosen = torch.zeros_like(size)
    count = max(1, round(fraction * int(scored.sum())))
    chosen[size.topk(count).indices] = 1
    return chosen * (size > 0)


def _mean_one(weights, scored):
    mean = weights[scored].mean()
    return weights / mean if mean > 0 else torch.ones_like(weights)


OBJECTIVES = {  # objective, and its weights of one sequence
    "CE": (CrossEntropy(), lambda long, short, scored: torch.ones_like(long)),
    "LongCE": (LongCE(2.0), lambda long, short, scored: (long - short).exp().clamp(max=2)),
    "normalized": (
        Normalized(LongCE(2.0)),
        lambda long, short, scored: _mean_one((long - short).exp().clamp(max=2), scored),
    ),
    "PPMI": (
        MutualInformation(shift=1.5),
        lambda long, short, scored: _mean_one((long - short - torch.tensor(1.5).log()).clamp(min=0), scored),
    ),
    "dense": (
        Interpolated(MutualInformation("absolute"), 0.3),
        lambda long, short, scored: 0.3 + 0.7 * _mean_one((long - short).abs(), scored),
    ),
    "sparse": (
        Interpolated(Sparse(fraction=0.2), 0.4),
        lambda long, short, scored: 0.4 + 0.6 * _mean_one(_sparse(long, short, scored, 0.2), scored),
    ),
    "rank": (RankInSequence(), lambda long, short, scored: _rank(long.masked_fill(~scored, torch.inf)) / 10),
}
HEADS = {
    "linear": ("llama", {}, {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "bias": ("phi", {"partial_rotary_factor": 0.5}, {}),
    "scaled": ("cohere", {"logit_scale": 0.25}, {}),
    "capped": ("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8}, {"attn_implementation": "eager"}),
    "LoRA": ("llama", {}, {"lora": {"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}}),
}
STRATEGIES = {
    "one": lambda: "auto",
    "DDP": lambda: "ddp",
    "FSDP2": FullyShardedStrategy,
    "Ulysses": lambda: UlyssesStrategy(sequence_parallel_size=2),
}
TABLE = [
    *(("one", "32-true", "linear", objective) for objective in OBJECTIVES),
    *(("one", "32-true", head, "LongCE") for head in list(HEADS)[1:]),
    ("one", "bf16-mixed", "linear", "LongCE"),
    ("one", "bf16-mixed", "LoRA", "LongCE"),
    *(
        pytest.param(("one", "bf16-mixed", head, "LongCE"), marks=pytest.mark.slow)
        for head in ("tied", "bias", "scaled", "capped")
    ),
    ("one", "bf16-true", "linear", "LongCE"),
]
SHARED = [
    ("DDP", "32-true", "linear", "PPMI"),
    ("DDP", "32-true", "LoRA", "sparse"),
    ("DDP", "bf16-mixed", "tied", "LongCE"),
    ("FSDP2", "32-true", "tied", "dense"),
    ("FSDP2", "32-true", "linear", "rank"),
    ("FSDP2", "bf16-mixed", "linear", "LongCE"),
    ("Ulysses", "32-true", "linear", "rank"),
    ("Ulysses", "32-true", "linear", "PPMI"),
    ("Ulysses", "32-true", "LoRA", "sparse"),
]


def rows(strategy):
    """Sequences of which only the last tokens are scored; one has none, and some hold two documents."""
    batches = []
    scored = (39, 22, 20, 0, 7, 30, 3, 12)
    for seed in range(4 if strategy == "one" else 8):
        batch = row(seed, boundaries=(0, 17, LENGTH) if seed % 3 == 1 else (0, LENGTH))
        batch["labels"][:, : LENGTH - scored[seed]] = IGNORE_INDEX
        batches.append(with_scored(batch))
    return batches


def save_model(root, head):
    architecture, overrides, settings = HEADS[head]
    attention = settings.get("attn_implementation", "sdpa")
    model = tiny_model(architecture, VOCABULARY, seed=6, attn_implementation=attention, **overrides)
    model.save_pretrained(root / head)


def record(root, case, rank=0):
    """Gradients of each optimizer step before clipping, what was logged, and the model before training."""
    strategy, precision, head, objective = case
    settings, folder = HEADS[head][2], root / head
    torch.manual_seed(0)
    module = LongContextLM(
        str(folder),
        objective=OBJECTIVES[objective][0],
        context_length=K,
        stride=D,
        optimizer=lambda parameters: FullRecorder(parameters, lr=1.0),
        **settings,
    )
    Recorder.seen, logged, start = [], [], []
    module.log_dict = lambda values, **_: logged.append({key: float(value) for key, value in values.items()})
    module.log = lambda *_, **__: None
    module.on_train_start = lambda: start.append(_whole_model(module, folder, settings))
    batches = rows(strategy)
    if strategy in ("DDP", "FSDP2"):
        batches = batches[rank::2]
    fit = trainer(
        root,
        strategy=STRATEGIES[strategy](),
        devices=1 if strategy == "one" else 2,
        precision=precision,
        inference_mode=strategy != "FSDP2",
        max_steps=-1,
        max_epochs=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    fit.fit(module, loader(*batches))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [dict(zip(names, step, strict=True)) for step in Recorder.seen], logged, start[0]


def _whole_model(module, folder, settings):
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return copy.deepcopy(module.backbone.model)
    plain = LongContextLM(str(folder), **settings)
    plain.configure_model()
    return plain.backbone.model


class FullRecorder(Recorder):
    """Gathers sharded gradients."""

    def step(self, closure):
        closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen.append([(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in gradients])


def expected_step(model, batches, objective):
    """Loss per token, mean weight and gradients by name of one optimizer step, in float64."""
    _, weigh = OBJECTIVES[objective]
    model.zero_grad()
    loss, weights, tokens = 0.0, 0.0, 0
    for batch in batches:
        pairs = []
        for start, stop in zip(batch["document_boundaries"][0], batch["document_boundaries"][0][1:], strict=False):
            ids = batch["input_ids"][0, start:stop]
            with torch.no_grad():
                short = reference.long_and_short(model, ids, K, D)[1]
            pairs.append((reference.document_log_likelihood(model, ids), short))
        long, short = (torch.cat(part) for part in zip(*pairs, strict=True))
        scored = batch["labels"][0].ne(IGNORE_INDEX)
        if scored.any():
            weight = weigh(long.detach(), short, scored)[scored]
            loss = loss - (weight * long[scored]).sum()
            weights, tokens = weights + weight.sum(), tokens + int(scored.sum())
    loss = loss / tokens
    loss.backward()
    return (
        float(loss.detach()),
        float(weights / tokens),
        {n: p.grad for n, p in model.named_parameters() if p.requires_grad},
    )


def check(case, steps, logged, model):
    strategy, precision, _, objective = case
    model, batches = model.double().eval(), rows(strategy)
    size = 2 if strategy in ("one", "Ulysses") else 4
    assert len(steps) == len(logged) == len(batches) // size
    exact = precision == "32-true"
    for number, (gradients, values) in enumerate(zip(steps, logged, strict=True)):
        loss, mean, expected = expected_step(model, batches[number * size : (number + 1) * size], objective)
        assert values["train/loss"] == pytest.approx(loss, rel=1e-4 if exact else 0.05)
        if "train/weight_mean" in values:
            assert values["train/weight_mean"] == pytest.approx(mean, rel=1e-4 if exact else 0.05)
        assert gradients.keys() == {f"backbone.model.{name}" for name in expected}
        actual, wanted = (
            torch.cat([part[name].double().flatten() for name in sorted(part)])
            for part in (gradients, {f"backbone.model.{name}": g for name, g in expected.items()})
        )
        error = (actual - wanted).norm() / wanted.norm()
        assert error < (1e-4 if exact else 0.25), (case, number)  # bfloat16 alone is off by up to 0.21 here


@pytest.mark.parametrize("case", TABLE, ids=" ".join)
def test_a_step_in_one_process(case, tmp_path):
    save_model(tmp_path, case[2])
    check(case, *record(tmp_path, case))


def _record_shared(rank, processes, root, cases):
    os.environ["LOCAL_RANK"] = str(rank)
    if any(strategy == "Ulysses" for strategy, *_ in cases):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute, and never called
    for number, case in enumerate(cases):
        results = record(root, case, rank)
        if rank == 0:
            torch.save(results, root / f"{number}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_a_step_in_two_processes(strategy, tmp_path):
    if strategy == "Ulysses":
        pytest.importorskip("deepspeed")
    cases = [case for case in SHARED if case[0] == strategy]
    for _, _, head, _ in cases:
        save_model(tmp_path, head)
    run_distributed(_record_shared, tmp_path, cases)
    register_document_attention()  # which the models that come back name
    for number, case in enumerate(cases):
        check(case, *torch.load(tmp_path / f"{number}.pt", weights_only=False))
