"""Fine-tuning of the studies: a run on a tiny model, and its comparisons against sums over a list."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.real_models import fine_tune as module
from benchmarks.real_models.correlate import GAMMA
from benchmarks.real_models.fine_tune import (
    CPU_SCALE,
    Arm,
    Examination,
    best_rate,
    compare_arms,
    equal_time_steps,
    list_arms,
    measure_costs,
    train,
    training_rows,
    tuning_arms,
)
from benchmarks.real_models.study import Study
from benchmarks.real_models.texts import Text
from benchmarks.real_models.verdicts import judge_fine_tune
from lightning_modules.functional.windows import ShortContext
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.influence_transfer import compute_influence
from lightning_modules.scoring.scored_model import ScoredModel, open_evaluator

SMALL = replace(CPU_SCALE, length=64, k=16)


@pytest.fixture
def small(monkeypatch, tiny_systems, model_dir):
    for name, value in {"SHORT": 16, "STARTS": {"as it is": None}}.items():
        monkeypatch.setattr(module, name, value)
    return load_tokenizer(str(model_dir))


def test_rows_are_pieces_of_the_books(small, corpus):
    batches = training_rows(corpus, small, seed=3, count=4, length=64)
    texts = [small.decode(batch["input_ids"][0]) for batch in batches]
    assert all(batch["input_ids"].shape == (1, 64) for batch in batches)
    assert all(any(text.strip() in book for book in corpus) for text in texts)
    again = training_rows(corpus, small, seed=3, count=4, length=64)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(batches, again, strict=True))


def test_weights_of_an_evaluator_are_kept(small, corpus, model_dir, tmp_path, monkeypatch):
    def load(*_, **options):
        return open_evaluator(EvaluatorConfig(str(model_dir), context_length=16, stride=16))

    monkeypatch.setattr(Study, "evaluator", load)
    study = Study(tmp_path, tmp_path, tmp_path, kept=tmp_path)
    batches = training_rows(corpus, small, seed=3, count=2, length=64)
    with torch.no_grad():
        expected = [compute_influence(each, load().backbone(), ShortContext(16, 16), gamma=GAMMA) for each in batches]
    for _ in range(2):
        stored = study._stored_weights(SMALL, small, batches)
        assert all(torch.equal(one, other) for one, other in zip(stored, expected, strict=True))
        monkeypatch.setattr(ScoredModel, "backbone", None)  # they are not computed again


@pytest.mark.parametrize("weighting", ["CE", "LongCE", "stored by the evaluator"])
def test_a_run_learns_its_rows_and_is_examined(small, corpus, evaluator_dir, tmp_path, weighting):
    texts = [Text("book 1", "books", corpus[0])]
    evaluator = open_evaluator(EvaluatorConfig(str(evaluator_dir), context_length=16, stride=16))
    scores = {"judge": {"book 1": evaluator.scores(corpus[0])}}
    examination = Examination(texts, scores, [])
    batches = training_rows(corpus[:1], small, seed=0, count=1, length=64) * 6
    arm = Arm("as it is", weighting, "steps", 1e-2, 0)
    stored = [torch.ones(1, 64)] * 6
    losses = []
    for steps in (1, 6):
        found = train(SMALL, arm, tmp_path, batches, lambda _: stored, examination, steps)
        by_kind = {kind: (loss, tokens) for _, kind, loss, tokens in found["losses"]}
        assert list(by_kind) == ["all", "judge", "short"]
        length = len(small.encode(corpus[0], add_special_tokens=True))
        assert by_kind["all"][1] == length - 1, "all but the first token"
        assert by_kind["short"][1] == length // 16 * 15, "all but the first token of each window"
        assert found["step_seconds"] > 0
        losses.append(by_kind["all"][0])
    assert losses[1] < losses[0]


def make_results(rates):
    draw = torch.Generator().manual_seed(0)
    found = {}
    for arm in list_arms(CPU_SCALE, rates):
        gain = {"LongCE": 0.9, "control: shuffled weights": 1.1}.get(arm.weighting, 1.0)
        losses = []
        for number in range(6):
            noise = 1 + 0.01 * float(torch.rand((), generator=draw))
            for kind, tokens in (("all", 100), ("qwen2.5-coder-0.5b", 10), ("short", 90)):
                factor = gain if kind.startswith("qwen") else 1.0
                losses.append([f"text {number}", kind, 2.0 * tokens * factor * noise, tokens])
        found[arm.path] = {"steps": 40, "step_seconds": 2.0, "losses": losses, "right": [True, False]}
    return found


def test_ratios_are_those_of_sums_and_verdicts_follow_them():
    rates = dict.fromkeys(CPU_SCALE.weightings[:4], 1e-5)
    found = make_results(rates)
    rows = list(compare_arms(CPU_SCALE, found, rates))
    assert len(rows) == 2 * 7

    def mean(weighting, kind):
        arms = [
            a
            for a in list_arms(CPU_SCALE, rates)
            if (a.start, a.weighting, a.budget) == ("as it is", weighting, "steps")
        ]
        chosen = [row for arm in arms for row in found[arm.path]["losses"] if row[1] == kind]
        return sum(row[2] for row in chosen) / sum(row[3] for row in chosen)

    (row,) = [r for r in rows if (r["start"], r["weighting"], r["budget"]) == ("as it is", "LongCE", "steps")]
    for kind in ("all", "qwen2.5-coder-0.5b", "short"):
        assert row["perplexity"][kind] == pytest.approx(math.exp(mean("LongCE", kind)))
        assert row["ratio"][kind]["ratio"] == pytest.approx(math.exp(mean("LongCE", kind) - mean("CE", kind)))
        assert len(row["ratio"][kind]["by_seed"]) == 3
    verdicts = {claim: holds for claim, holds, _ in judge_fine_tune({"rows": rows})}
    assert verdicts["1. as it is, LongCE, steps: pays"]
    assert not verdicts["1. as it is, LongCE, half CE, steps: pays"]
    assert verdicts["3. as it is, control: shuffled weights, steps: does not pay"]


def test_the_rate_is_the_best_of_the_tuning_runs_and_the_steps_follow_from_the_costs():
    found = {}
    for arm in tuning_arms("LongCE"):
        loss = abs(arm.rate - 2e-5) * 1e5 + 1
        found[arm.path] = {"losses": [["book 1", "judge", loss, 1]], "right": []}
    assert best_rate(found, "LongCE", "judge") == 2e-5
    assert equal_time_steps(CPU_SCALE, {"CE": 2.0, "LongCE": 3.0}, "LongCE") == 16
    assert equal_time_steps(CPU_SCALE, {"CE": 2.0, "LongCE": 1.0}, "LongCE") == 24, "at most the rows that there are"


def test_costs_of_all_weightings_are_measured_in_turn(small, corpus, tmp_path):
    costs = measure_costs(SMALL, tmp_path, training_rows(corpus, small, seed=0, count=3, length=64), rounds=3)
    assert set(costs) == {"CE", "LongCE", "LongCE, half CE"}
    assert min(costs.values()) > 0  # which is larger depends on what else the machine does
