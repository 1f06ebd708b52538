import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.reproduction.tables.ours import DEFAULT, measured_intervals, ours
from benchmarks.reproduction.tables.published import find_table
from benchmarks.reproduction.tables.results import ITSELF, DocumentResult, Result, save_times
from lightning_modules.utilities.statistics import weighted_mean_interval

JUDGE = "Qwen2-72B-Instruct"
NLL = {"M": 1.0, "N": 2.0, "O": 0.5, "P": 3.0}


def results(evaluator=JUDGE):
    found = {}
    for model, nll in NLL.items():
        sums = {"perplexity": (-nll * 10, 10.0), "alpha=2 beta=-2": (-nll, 2.0)}
        entry = DocumentResult("a", 11, nll, sums)
        failure = "no" if model == "P" else None
        found[model, evaluator] = Result(model, evaluator, {}, {}, [entry, entry, entry], failure)
    return found


def pearson(x, y):
    means = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - means[0]) * (b - means[1]) for a, b in zip(x, y, strict=True))
    return covariance / math.sqrt(sum((a - means[0]) ** 2 for a in x) * sum((b - means[1]) ** 2 for b in y))


def test_correlations_are_over_models_with_both():
    scores = {"M": {"LongBench": 30.0, "RULER": 1}, "N": {"LongBench": 20.0, "RULER": 2}, "O": {"LongBench": 37.0}}
    scores["P"] = {"LongBench": 99.0, "RULER": 3}  # could not be measured
    cells = ours(find_table("table1"), results(), scores, [])
    ppl, longppl = ([math.exp(factor * NLL[name]) for name in "MNO"] for factor in (1, 0.5))
    assert cells["PPL", "LongBench"] == pytest.approx(pearson(ppl, [30, 20, 37]))
    assert cells["LongPPL-hard (default)", "LongBench"] == pytest.approx(pearson(longppl, [30, 20, 37]))
    assert {column for _, column in cells} == {"LongBench"}  # two models have no correlation
    assert ours(find_table("table1"), results("other"), scores, []) == {}


def test_perplexities_by_evaluator_and_by_the_model_itself():
    cells = ours(find_table("table5"), results() | results(ITSELF), {}, [])
    assert cells["N", JUDGE] == pytest.approx(math.exp(1.0))
    assert cells["N", "PPL"] == pytest.approx(math.exp(2.0))
    assert ("P", "PPL") not in cells
    assert {column for _, column in cells} == {JUDGE, "PPL"}
    cells = ours(find_table("table6"), results() | results(ITSELF), {}, [])
    assert cells == {(name, "LongPPL"): pytest.approx(math.exp(NLL[name] / 2)) for name in "MNO"}


def test_intervals_of_perplexities():
    result = results()["M", JUDGE]
    documents = [replace(result.documents[0], sums={"perplexity": (-n, 10.0), DEFAULT: (-n, 2.0)}) for n in range(1, 7)]
    result = replace(result, documents=documents)
    found = measured_intervals(find_table("table5"), {("M", JUDGE): result}, [])
    assert found["M", "PPL"] == pytest.approx(weighted_mean_interval(np.exp(np.arange(1, 7) / 10), np.full(6, 10.0)))
    assert found["M", JUDGE] == pytest.approx(weighted_mean_interval(np.exp(np.arange(1, 7) / 2), np.full(6, 2.0)))


def test_times_add_up(tmp_path):
    save_times(tmp_path, JUDGE, {}, [50.0, 10.0, 12.0])
    cells = ours(find_table("table12"), results(), {}, [tmp_path])
    assert cells["N", "PPL"] == 2.0
    assert cells["N", f"LongPPL ({JUDGE})"] == 13.0


def test_scores_of_runs_with_gains_and_averages():
    scores = {"A-CE-50": {"LongBench": 20.0}, "A-LongCE-50": {"LongBench": 26.0, "LongEval": 24.0}}
    cells = ours(find_table("table3"), {}, scores, [])
    assert cells == {
        ("A (PG-19, EABF): CE", "LongBench 50"): 20.0,
        ("A (PG-19, EABF): LongCE", "LongBench 50"): 26.0,
        ("A (PG-19, EABF): LongCE", "LongEval 50"): 24.0,
        ("A (PG-19, EABF): Gain", "LongBench 50"): 6.0,
    }
    tasks = find_table("table10").columns[:-1]
    scores = {"Llama-2-7B": {task: 10.0 + i for i, task in enumerate(tasks)}, "A-CE-200": {"MMLU": 41.0}}
    cells = ours(find_table("table10"), {}, scores, [])
    assert cells["Llama-2-7B", "Avg."] == 12.5
    assert {row: column for row, column in cells if row != "Llama-2-7B"} == {"+CE (baseline)": "MMLU"}


def test_hours_of_training_are_those_of_the_run_on_8_gpus(tmp_path):
    """Of the run's folder, at the steps that a table reports; those of a file of scores come first."""
    folder = tmp_path / "runs" / "A-LongCE"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    # Lightning numbers steps from 0.
    (folder / "metrics.csv").write_text("step,train/gpu_hours\n48,24\n49,25\n99,50\n199,99\n")
    scores = {"A-LongCE-50": {"LongBench": 26.0}, "A-LongCE-200": {"Training hours": 12.5}}
    cells = ours(find_table("figure7"), {}, scores, [tmp_path / "nothing", tmp_path])
    assert cells == {
        ("LongCE", "Training hours 50"): 25 / 8,
        ("LongCE", "Training hours 100"): 50 / 8,
        ("LongCE", "Training hours 200"): 12.5,
        ("LongCE", "LongBench 50"): 26.0,
    }
    assert ours(find_table("table3"), {}, scores, [tmp_path]) == {("A (PG-19, EABF): LongCE", "LongBench 50"): 26.0}
