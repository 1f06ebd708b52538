"""The words and the picture at the top of a comparison."""

import math
import re

import numpy as np
import pandas as pd
import pytest

from lightning_modules.commands.compare.command import compare_runs, draw_curves
from lightning_modules.commands.compare.runs import ComparedRun
from lightning_modules.commands.compare.verdict import Ratio, draw_ratios, measure_ratios, write_verdict
from lightning_modules.utilities.statistics import paired_ratio

DOCUMENTS = 12
CELL = "books, judge (K 64), alpha 2, beta -2"


def make_run(name, factor, *, cells=(CELL,), noise=0.02, key_tokens=20, steps=None, seed=0):
    draw = np.random.default_rng(seed)
    evaluations = {}
    for cell in cells:
        values = np.linspace(3, 9, DOCUMENTS) * factor * np.exp(noise * draw.standard_normal(DOCUMENTS))
        columns = {"longppl": values, "perplexity": np.linspace(20, 30, DOCUMENTS), "key_tokens": key_tokens}
        table = pd.DataFrame({**columns, "tokens": 1000.0, "text_sha256": [f"{n}" for n in range(DOCUMENTS)]})
        table.index = pd.MultiIndex.from_tuples([(f"doc {n}", 0) for n in range(DOCUMENTS)])
        evaluations[cell] = {100: table}
    scalars = {"step": {steps: steps}, "train/tokens": {steps: 1000 * steps}} if steps else {}
    return ComparedRun(name, evaluations, {}, scalars)


@pytest.mark.parametrize(
    ("factor", "noise", "claim", "outcome"),
    [
        (0.8, 0.02, "`new` predicts key tokens better than `old`: LongPPL is ", "better"),
        (1.3, 0.02, "`new` predicts key tokens worse than `old`: LongPPL is ", "worse"),
        (1.0, 0.3, "`new` and `old` cannot be told apart on key tokens: LongPPL is ", "tie"),
    ],
)
def test_one_evaluation_is_judged_by_its_interval(factor, noise, claim, outcome):
    old, new = make_run("old", 1.0, noise=0.0), make_run("new", factor, noise=noise)
    first, *_ = write_verdict([old, new], old, [])
    assert first.startswith(claim)
    assert "over 12 documents with 240 key tokens (books, judge, alpha 2, beta -2)." in first
    assert first.endswith(
        "Perplexity, over all tokens, is the same (ratio 1.000, 95% interval 1.000 to 1.000): no difference is shown."
    )
    ratio = measure_ratios([new], old)[0]
    assert ratio.outcome == outcome
    assert f"{abs(ratio.value - 1):.1%} {'lower' if ratio.value < 1 else 'higher'}" in first
    # The numbers are those of the table.
    merged = new.last(ratio.cell)[1].merge(
        old.last(ratio.cell)[1], left_index=True, right_index=True, suffixes=("", "_baseline")
    )
    assert (ratio.value, ratio.interval) == paired_ratio(merged, "longppl")


def test_documents_without_key_tokens_are_told_from_those_of_the_table():
    counts = [0.0, *[20.0] * (DOCUMENTS - 1)]
    old, new = make_run("old", 1.0, noise=0.0, key_tokens=counts), make_run("new", 0.8, key_tokens=counts)
    first, *_ = write_verdict([old, new], old, [])
    assert "over 220 key tokens of 11 of 12 documents" in first


def test_several_evaluations_are_counted():
    cells = tuple(f"books, judge {n} (K 64), alpha 2, beta -2" for n in range(4))
    old, new = make_run("old", 1.0, cells=cells, noise=0.0), make_run("new", 0.8, cells=cells)
    first, *_ = write_verdict([old, new], old, [])
    assert "of 4 evaluations, 4 show it better and 0 worse, and 0 do not tell" in first
    assert (
        f"times as large (lower is better), each over {DOCUMENTS} documents with key tokens. Each evaluation is"
        in first
    )
    mixed = new._replace(
        evaluations=new.evaluations | {cells[0]: make_run("new", 1.3, cells=cells[:1]).evaluations[cells[0]]}
    )
    assert "depends on the evaluation" in write_verdict([old, mixed], old, [])[0]


@pytest.mark.parametrize(
    ("factors", "judged"), [((1.1, 1.2), "worse"), ((0.9, 1.2), "better on books; worse on reports")]
)
def test_perplexities_of_several_sets_are_judged_together(factors, judged):
    cells = ("books, judge (K 64), alpha 2, beta -2", "reports, judge (K 64), alpha 2, beta -2")
    old, new = make_run("old", 1.0, cells=cells), make_run("new", 0.8, cells=cells)
    for cell, factor in zip(cells, factors, strict=True):
        new.evaluations[cell][100]["perplexity"] *= factor * np.exp(0.001 * np.arange(DOCUMENTS))
    first, *_ = write_verdict([old, new], old, [])
    low, high = (f"{factor:.1f}" for factor in factors)
    assert re.search(rf"Perplexity, over all tokens, is {low}\d\d to {high}\d\d times as large: {judged}\.$", first)


def test_few_documents_no_key_tokens_and_diverged_models():
    old, new = make_run("old", 1.0), make_run("new", 0.5)
    few = new._replace(evaluations={cell: {1: steps[100][:3]} for cell, steps in new.evaluations.items()})
    assert (
        "compared on too few documents to tell: LongPPL is 0.500 times as large"
        in write_verdict([old, few], old, [])[0]
    )
    blind = make_run("blind", 1.0, key_tokens=0)
    assert "share no key tokens" in write_verdict([blind, make_run("new", 1.0, key_tokens=0)], blind, [])[0]
    wild = make_run("wild", math.inf)
    assert "worse than `old`: LongPPL is infinite for the run" in write_verdict([old, wild], old, [])[0]
    assert write_verdict([old], old, []) == []
    assert "seed" not in write_verdict([old, new], old, [])[-1]  # of models that were only scored


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
    verdict = write_verdict([tables["old"], tables["new"]], tables["old"], [])[0]
    assert verdict.startswith("`new` predicts key tokens better than `old`: key bits per byte are ")
    assert f"over 12 documents with {12 * 90:,} key bytes" in verdict
    assert re.search(r"Bits per byte, over all tokens, are .*: better\.$", verdict)


def test_a_model_that_found_the_key_tokens_itself_is_named():
    config = {"model.identity": "sha256:a", "evaluator.identity": "sha256:b"}
    old, new = (make_run(name, factor)._replace(config=config) for name, factor in (("old", 1.0), ("new", 0.5)))
    assert "itself the evaluator" not in " ".join(write_verdict([old, new], old, []))
    own = new._replace(config={**config, "model.identity": "sha256:b"})
    assert "`new` is itself the evaluator, which favors it" in " ".join(write_verdict([old, own], old, []))


@pytest.mark.parametrize(("hours", "said"), [(1.5, "device hours are `old` 1, `new` 1.5."), (1.05, "")])
def test_unequal_costs_are_named_unless_they_are_noise(hours, said):
    old, new = (make_run(name, factor, steps=100) for name, factor in (("old", 1.0), ("new", 0.8)))
    for run, value in ((old, 1.0), (new, hours)):
        run.scalars["train/gpu_hours"] = {100: value}
    verdict = " ".join(write_verdict([old, new], old, []))
    assert ("did not cost the same" in verdict) == bool(said)
    assert said in verdict


def test_unequal_training_and_settings_are_named():
    old, new = make_run("old", 1.0, steps=100), make_run("new", 0.8, steps=200)
    rows = [["trainer.max_steps", "100", "200, from step 4 on 300"], ["data.seed", "1", "2"], ["optimizer", "a", "b"]]
    rows.append(["model.objective", "lightning_modules.objectives.CrossEntropy", "lightning_modules.objectives.LongCE"])
    verdict = " ".join(write_verdict([old, new], old, rows))
    assert (
        "not trained equally: optimizer steps (`old` 100, `new` 200) and tokens (`old` 100,000, `new` 200,000)."
        in verdict
    )
    assert "They differ in `model.objective` (`old`: CrossEntropy; `new`: LongCE)" in verdict
    assert "`trainer.max_steps` (`old`: 100; `new`: 200, from step 4 on 300)" in verdict
    assert "and 1 more setting (below)" in verdict
    assert "equally" not in " ".join(write_verdict([old, make_run("new", 0.8, steps=100)], old, []))


def test_the_picture_labels_what_differs():
    cell = "books, judge: qwen (sha256:aa, K 64), alpha 2, beta -2"
    ratios = [
        Ratio(cell, "new", "longppl", 0.8, (0.7, 0.9), 9, 90),
        Ratio(cell, "new", "perplexity", 1.0, (0.99, 1.01), 9, 900),
        Ratio("reports, judge: gemma (sha256:bb, K 64), alpha 2, beta -2", "new", "longppl", 0.9, None, 3, 9),
    ]
    svg = draw_ratios(ratios)
    assert "books, judge: qwen, alpha 2, beta -2" in svg
    assert "reports, judge: gemma, alpha 2, beta -2" in svg
    assert "new ·" not in svg
    assert "better" in svg


def test_the_best_run_excludes_a_tie():
    old = make_run("old", 1.0, noise=0.0)
    assert "new (best LongPPL)" in compare_runs([old, make_run("new", 0.8)])
    assert "(best LongPPL)" not in compare_runs([old, make_run("new", 0.99, noise=0.3)])


def test_a_set_without_key_tokens_is_named_and_final_numbers_are_not_folded(tmp_path):
    cells = [f"set {number}, judge (K 64), alpha 2, beta -2" for number in range(8)]
    old, new = (make_run(name, 1.0, cells=cells) for name in ("old", "new"))
    blind = {"blind, judge (K 64), alpha 2, beta -2": make_run("", 1.0, key_tokens=0).evaluations[CELL]}
    old, new = (run._replace(evaluations=run.evaluations | blind) for run in (old, new))
    assert compare_runs([old, new], tmp_path / "page.html").count("no key tokens") == 2
    section = (tmp_path / "page.html").read_text().partition("<h2>Final numbers</h2>")[2].partition("</section>")[0]
    assert section.count("<tr>") == 19
    assert "<details" not in section


def test_curves_over_more_than_a_factor_of_ten_have_a_logarithmic_axis():
    def curve(last):
        run = make_run("run", 1.0)
        steps = {step: run.evaluations[CELL][100].assign(longppl=value) for step, value in ((0, 40.0), (100, last))}
        scalars = {"step": {100: 100.0}}
        return draw_curves([run._replace(evaluations={CELL: steps}, scalars=scalars)], "optimizer steps")

    def ticks(figures):
        return re.findall(r">([\d.]+)<", figures[f"LongPPL: {CELL}"])

    assert {"5", "10", "20"} <= set(ticks(curve(2.0)))
    assert "35" in ticks(curve(20.0))
