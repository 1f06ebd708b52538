"""Optimizer steps of objectives that are normalised or change in training, against plain float64 sums."""

import copy
import os
import sys

import pytest
import torch

from lightning_modules.batch import IGNORE_INDEX
from lightning_modules.objectives import Interpolated, LongCE, MutualInformation, Normalised, Scheduled, Sparse
from lightning_modules.training.export import objective_facts
from lightning_modules.training.export.card import _named
from tests.conftest import tiny_model
from tests.lightning_modules.test_long_context_lm import VOCABULARY, Recorder, lm, loader, row, trainer
from tests.support.distributed import run_distributed

K, D = 8, 4


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", VOCABULARY, seed=6).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def unequal_rows():
    """Rows of which only the last tokens are scored; one has no scored token at all."""
    rows = [row(seed) for seed in range(8)]
    for each, scored in zip(rows, (39, 2, 20, 0, 7, 30, 3, 12), strict=True):
        each["labels"][:, : each["labels"].shape[1] - scored] = IGNORE_INDEX
    return rows


def log_likelihoods(model, ids):
    """``[T]`` of one row, token by token, with 0 for the first."""
    log_probabilities = model(ids).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1).double(), log_probabilities.gather(-1, ids[0, 1:, None])[:, 0]])


def long_and_short(model, ids):
    long = log_likelihoods(model, ids)
    with torch.no_grad():
        short = long.detach().clone()
        for start in range(D, ids.shape[1] - K, D):
            window = log_likelihoods(model, ids[:, start : start + K + D])
            short[start + K : start + K + D] = window[K:]
    return long, short


def weighted_sums(model, rows, weigh):
    """Sum of weighted negative log-likelihoods, sum of weights, and the number of scored tokens."""
    loss, weights, tokens = 0.0, 0.0, 0
    for each in rows:
        long, short = long_and_short(model, each["input_ids"])
        scored = each["labels"][0] != IGNORE_INDEX
        weight = weigh(long.detach(), short)[scored]
        loss = loss - (weight * long[scored]).sum()
        weights, tokens = weights + weight.sum(), tokens + int(scored.sum())
    return loss, weights, tokens


OBJECTIVES = {
    "normalised": (Normalised(LongCE(2.0)), lambda long, short: (long - short).exp().clamp(max=2)),
    "PPMI": (MutualInformation(shift=1.5), lambda long, short: (long - short - torch.tensor(1.5).log()).clamp(min=0)),
    "dense": (
        Interpolated(MutualInformation("absolute"), 0.3),
        lambda long, short: 0.3 + 0.7 * (long - short).abs(),
    ),
}


def recorded_steps(rank, world_size, folder, target, name):
    if world_size > 1:  # or processes that later tests start would wait for others
        os.environ["LOCAL_RANK"] = str(rank)
    module = lm(folder, objective=OBJECTIVES[name][0], optimizer=lambda parameters: Recorder(parameters, lr=1.0))
    Recorder.seen, logged = [], []
    module.log_dict = lambda values, **_: logged.append({key: float(value) for key, value in values.items()})
    module.log = lambda *_, **__: None
    settings = {"accumulate_grad_batches": 2, "devices": world_size, "strategy": "ddp" if world_size > 1 else "auto"}
    fit = trainer(target, max_steps=-1, max_epochs=1, use_distributed_sampler=False, **settings)
    fit.fit(module, loader(*unequal_rows()[rank::world_size]))
    if rank == 0:
        torch.save((Recorder.seen, logged), target / "steps.pt")


@pytest.mark.parametrize(
    ("name", "processes"), [*((name, 1) for name in OBJECTIVES), pytest.param("PPMI", 2, marks=pytest.mark.slow)]
)
def test_a_normalised_step_divides_by_all_its_weights(folder, tmp_path, name, processes):
    if processes == 1:
        recorded_steps(0, 1, folder, tmp_path, name)
    else:
        run_distributed(recorded_steps, folder, tmp_path, name, world_size=processes)
    recorded, logged = torch.load(tmp_path / "steps.pt")
    rows, size = unequal_rows(), 2 * processes
    assert len(recorded) == len(rows) // size
    for number, (gradients, values) in enumerate(zip(recorded, logged, strict=True)):
        model = tiny_model("llama", VOCABULARY, seed=6).double()
        step = rows[number * size : (number + 1) * size]
        loss, weights, tokens = weighted_sums(model, step, OBJECTIVES[name][1])
        (loss / weights).backward()
        assert values["train/loss"] == pytest.approx(float(loss / weights), rel=1e-4)
        assert values["train/weight_mean"] == pytest.approx(float(weights / tokens), rel=1e-4)
        for gradient, (part, parameter) in zip(gradients, model.named_parameters(), strict=True):
            torch.testing.assert_close(gradient.double(), parameter.grad, rtol=1e-4, atol=1e-5, msg=part)


def test_a_normalised_step_without_any_weight_changes_nothing(folder, tmp_path):
    Recorder.seen = []
    module = lm(folder, objective=Sparse(1e6), optimizer=lambda parameters: Recorder(parameters, lr=1.0))
    fit = trainer(tmp_path, max_steps=1)
    fit.fit(module, loader(row(0)))
    assert all(gradient.eq(0).all() for gradient in Recorder.seen[0])
    assert fit.callback_metrics["train/loss"] == fit.callback_metrics["train/weight_mean"] == 0


def test_a_schedule_makes_short_passes_only_where_there_are_weights(folder, tmp_path, monkeypatch):
    module = lm(folder, objective=Scheduled(LongCE(), start=1, warmup=2, stop=4))
    fit = trainer(tmp_path, max_steps=6, accumulate_grad_batches=2)
    passes, logged, short_pass = [], [], module._short_pass
    monkeypatch.setattr(module, "_short_pass", lambda *given: passes.append(fit.global_step) or short_pass(*given))
    module.log_dict = lambda values, **_: logged.append({key: float(value) for key, value in values.items()})
    module.log = lambda *_, **__: None
    fit.fit(module, loader(*[row(seed) for seed in range(12)]))
    assert passes == [2, 2, 3, 3], "half of the weights in the first, all of them in the second"
    assert [values["train/weight_mean"] == 1 for values in logged] == [True, True, False, False, True, True]
    assert [values["train/weight_at_cap"] > 0 for values in logged] == [False, False, True, True, False, False]
    assert len({tuple(sorted(values)) for values in logged}) == 1, "the same curves throughout"


def test_a_normalised_objective_refuses_drawn_windows_before_anything_is_loaded():
    with pytest.raises(ValueError, match="short_window_share"):
        lm("nowhere", objective=Normalised(LongCE()), short_window_share=0.5)


def test_facts_of_an_objective_in_another_one():
    objective = Interpolated(Normalised(LongCE(3.0)), 0.25)
    facts = objective_facts(objective, 8, 4)["objective"]
    inner = {"name": "Normalised", "objective": {"name": "LongCE", "gamma": 3.0}}
    assert facts == {"name": "Interpolated", "objective": inner, "cross_entropy_share": 0.25}
    assert _named(copy.deepcopy(facts)) == (
        "Interpolated (objective = Normalised (objective = LongCE (gamma = 3.0)), cross_entropy_share = 0.25)"
    )


def test_objectives_in_a_config(tmp_path, monkeypatch):
    from lightning_modules.commands.cli.lightning_cli import LongceCLI

    (tmp_path / "objective.yaml").write_text(
        "model:\n  objective:\n    class_path: lightning_modules.objectives.Interpolated\n    init_args:\n"
        "      cross_entropy_share: 0.2\n      objective:\n"
        "        {class_path: lightning_modules.objectives.MutualInformation, init_args: {part: absolute}}\n"
    )
    base, debug = (f"{os.path.dirname(__file__)}/../../configs/{name}.yaml" for name in ("base", "debug"))
    configs = [word for name in (base, debug, str(tmp_path / "objective.yaml")) for word in ("-c", name)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce", "fit", *configs])
    objective = LongceCLI().model.objective
    assert isinstance(objective, Interpolated)
    assert (objective.cross_entropy_share, objective.objective.part) == (0.2, "absolute")
