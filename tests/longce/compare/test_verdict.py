"""The words and the picture at the top of a comparison."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from lightning_modules.utilities.statistics import paired_ratio
from longce.compare import ratios
from longce.compare.runs import Cell, ComparedRun, name_cells
from longce.compare.verdict import draw_ratios, write_verdict

DOCUMENTS = 12
CELL = Cell("books", "judge", "alpha 2, beta -2", "K 64")


def make_run(name, factor, *, cells=(CELL,), noise=0.02, key_tokens=20, steps=None, seed=0):
    draw = np.random.default_rng(seed)
    evaluations = {}
    for cell in cells:
        values = np.linspace(3, 9, DOCUMENTS) * factor * np.exp(noise * draw.standard_normal(DOCUMENTS))
        columns = {"longppl": values, "perplexity": np.linspace(20, 30, DOCUMENTS), "key_tokens": key_tokens}
        columns |= {"longppl_soft": values, "soft_weight": 1500.0}
        table = pd.DataFrame({**columns, "tokens": 1000.0, "document": [f"doc {n}" for n in range(DOCUMENTS)]})
        table.index = pd.MultiIndex.from_tuples([(f"text {n}", 0) for n in range(DOCUMENTS)])
        evaluations[cell] = {100: table}
    scalars = {"step": {steps: steps}, "train/tokens": {steps: 1000 * steps}} if steps else {}
    return ComparedRun(name, evaluations, {}, scalars)


def measure(runs, baseline):
    """Ratios that the verdict is about."""
    found = ratios.measure_ratios(runs, baseline, name_cells([baseline, *runs])[0])
    return [ratio for ratio in found if ratio.kind in (*ratios.OF_KEY_TOKENS, *ratios.OF_ALL_TOKENS) and ratio.units]


def judge(baseline, *runs):
    return write_verdict([baseline, *runs], baseline, measure(runs, baseline), name_cells([baseline, *runs])[0])


@pytest.mark.parametrize(
    ("factor", "noise", "claim", "outcome"),
    [
        (0.8, 0.02, "`new` predicts key tokens better than `old`: the ratio of LongPPL is ", "better"),
        (1.3, 0.02, "`new` predicts key tokens worse than `old`: the ratio of LongPPL is ", "worse"),
        (1.0, 0.3, "`new` and `old` cannot be told apart on key tokens: the ratio of LongPPL is ", "tie"),
    ],
)
def test_one_evaluation_is_judged_by_its_interval(factor, noise, claim, outcome):
    old, new = make_run("old", 1.0, noise=0.0), make_run("new", factor, noise=noise)
    first, *_ = judge(old, new)
    assert first.startswith(claim)
    ratio = measure([new], old)[0]
    assert ratio.outcome == outcome
    # The numbers are those of the table.
    merged = new.last(ratio.cell)[1].merge(
        old.last(ratio.cell)[1], left_index=True, right_index=True, suffixes=("", "_baseline")
    )
    assert (ratio.value, ratio.interval) == paired_ratio(merged, "longppl")


@pytest.mark.parametrize(
    ("factors", "claim", "of_all_tokens"),
    [
        ((0.8, 0.9), "`new` predicts key tokens better than `old`", "better in 2 and worse in 0"),
        ((1.1, 1.2), "`new` predicts key tokens worse than `old`", "better in 0 and worse in 2"),
        ((1.0, 1.0), "`new` and `old` cannot be told apart on key tokens", "better in 0 and worse in 2"),
        ((0.9, 1.2), "`new` predicts key tokens better than `old` depends on", "better in 1 and worse in 1"),
    ],
)
def test_several_evaluations_are_judged_together(factors, claim, of_all_tokens):
    cells = (CELL, CELL._replace(set="reports"))
    old = make_run("old", 1.0, cells=cells, noise=0.0)
    new = make_run("new", 1.0, cells=cells)
    for cell, factor in zip(cells, factors, strict=True):
        for number in ("longppl", "perplexity"):
            new.evaluations[cell][100][number] *= factor * np.exp(0.001 * np.arange(DOCUMENTS))
    first, second, *_ = judge(old, new)
    assert claim in first
    assert of_all_tokens in second


def test_few_documents_no_key_tokens_and_diverged_models():
    old = make_run("old", 1.0)
    new = make_run("new", 0.5)
    few = new._replace(evaluations={cell: {1: steps[100][:3]} for cell, steps in new.evaluations.items()})
    assert measure([few], old)[0].outcome == "unknown"
    blind = make_run("blind", 1.0, key_tokens=0)
    same = make_run("new", 1.0, key_tokens=0)
    assert {ratio.kind for ratio in measure([same], blind)} == {"perplexity"}
    assert "had no evaluator, or share no key tokens" in judge(blind, same)[0]
    assert measure([make_run("wild", math.inf)], old)[0].outcome == "worse"
    assert judge(old) == []


def test_models_with_other_tokens_are_judged_by_bits_per_byte():
    """Bytes of all scored tokens differ if only one model reads a special token, before which nothing is scored."""
    tables = {}
    for name, factor, tokens, scored_bytes in (("old", 1.0, 1000.0, 3990), ("new", 0.5, 900.0, 4000)):
        (run,) = [make_run(name, 1.0, noise=0.0)]
        bits = np.linspace(0.4, 0.8, DOCUMENTS) * factor * np.exp(0.05 * np.sin(np.arange(DOCUMENTS)) * (factor < 1))
        numbers = {
            "tokens": tokens,
            "key_bits_per_byte": bits,
            "bits_per_byte": bits,
            "longppl_per_evaluator_token": 2.0,
        }
        units = {"key_bytes": 90.0, "bytes": scored_bytes, "evaluator_key_tokens": 20.0}
        tables[name] = run._replace(evaluations={CELL: {100: run.evaluations[CELL][100].assign(**numbers, **units)}})
    of_key, of_all, *_ = judge(tables["old"], tables["new"])
    assert of_key.startswith("`new` predicts key tokens better than `old`: the ratio of key bits/byte is ")
    assert f"over 12 documents with {12 * 90:,} key bytes" in of_key
    assert re.search(r"The ratio of bits/byte, over all tokens, is .*: better\.$", of_all)


def test_a_model_that_found_the_key_tokens_itself_is_named():
    config = {"model.identity": "sha256:a", "evaluator.identity": "sha256:b"}
    old, new = (make_run(name, factor)._replace(config=config) for name, factor in (("old", 1.0), ("new", 0.5)))
    assert "itself the evaluator" not in " ".join(judge(old, new))
    own = new._replace(config={**config, "model.identity": "sha256:b"})
    assert "`new` is itself the evaluator, which favors it" in " ".join(judge(old, own))


@pytest.mark.parametrize(
    ("hours", "steps", "said"),
    [(1.5, 100, "device hours"), (1.0, 200, "They differ in optimizer steps: `old` 100, `new` 200."), (1.05, 100, "")],
)
def test_unequal_training_is_named_unless_it_is_noise(hours, steps, said):
    old = make_run("old", 1.0, steps=100)
    new = make_run("new", 0.8, steps=steps)
    old.scalars["train/gpu_hours"] = {100: 1.0}
    new.scalars["train/gpu_hours"] = {steps: hours}
    verdict = " ".join(judge(old, new))
    assert said in verdict
    assert ("They differ in" in verdict) == bool(said)


@pytest.mark.parametrize("interval", [None, (0.9, 1.1), (0.05, 3.0), (1e-3, 1e3), (1e-20, 1e20)])
def test_the_axis_of_ratios_can_be_read(interval):
    found = [ratios.Ratio(CELL, "new", "longppl", 0.95, interval, total=12, shared=12, documents=12, units=240)]
    picture = draw_ratios(found, {CELL: "books"})
    assert 2 <= picture.count('id="xtick_') <= 10
    assert ">1e" not in picture, "a model that has diverged stretches the axis"
