"""Optimizer steps of objectives that are normalised or change in training, against plain float64 sums."""

import os
import sys

import pytest

from lightning_modules.models.short_context import ShortContextConfig
from lightning_modules.objectives import Interpolated, LongCE, Normalized, Scheduled
from lightning_modules.training.facts import objective_facts
from tests.conftest import tiny_model
from tests.lightning_modules.test_long_context_lm import VOCABULARY, lm, loader, row, trainer

K, D = 8, 4


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", VOCABULARY, seed=6).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_schedule_makes_short_passes_only_where_there_are_weights(folder, tmp_path, monkeypatch):
    module = lm(folder, objective=Scheduled(LongCE(), start=1, warmup=2, stop=4))
    fit = trainer(tmp_path, max_steps=6, accumulate_grad_batches=2)
    passes, logged, short_pass = [], [], ShortContextConfig.score

    def count(*args, **options):
        passes.append(fit.global_step)
        return short_pass(*args, **options)

    monkeypatch.setattr(ShortContextConfig, "score", count)
    module.log_dict = lambda values, **_: logged.append({key: float(value) for key, value in values.items()})
    module.log = lambda *_, **__: None
    fit.fit(module, loader(*[row(seed) for seed in range(12)]))
    assert passes == [2, 2, 3, 3], "half of the weights in the first, all of them in the second"
    assert [values["train/weight_mean"] == 1 for values in logged] == [True, True, False, False, True, True]
    assert [values["train/weight_at_cap"] > 0 for values in logged] == [False, False, True, True, False, False]
    assert len({tuple(sorted(values)) for values in logged}) == 1, "the same curves throughout"


def test_a_normalised_objective_refuses_drawn_windows_before_anything_is_loaded():
    with pytest.raises(ValueError, match="window_fraction"):
        lm("nowhere", objective=Normalized(LongCE()), window_fraction=0.5)


def test_facts_of_an_objective_in_another_one():
    objective = Interpolated(Normalized(LongCE(3.0)), 0.25)
    facts = objective_facts(objective, 8, 4)["objective"]
    inner = {"name": "Normalized", "objective": {"name": "LongCE", "gamma": 3.0}, "mean_over": "step"}
    assert facts == {"name": "Interpolated", "objective": inner, "cross_entropy_share": 0.25}


@pytest.mark.slow
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
