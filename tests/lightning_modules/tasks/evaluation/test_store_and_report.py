import json
import math
import re
import shutil
import xml.dom.minidom
from dataclasses import replace

import numpy as np
import pytest

from lightning_modules.tasks.evaluation.evaluation import ResultStore, read_results
from lightning_modules.tasks.evaluation.questions import TaskResult
from lightning_modules.tasks.evaluation.report import (
    answer_table,
    describe_synthetic_text,
    drawn_heat_maps,
    write_task_report,
)
from lightning_modules.tasks.evaluation.summary import summarize
from tests.support.browser import check_page, launch_chromium

SETTINGS = {"model": "a/b", "seed": 0, "mode": "teacher_forced"}


def result(task="niah", length=1024, depth=0.0, index=0, score=1.0):
    return TaskResult(
        task, length, depth, index, depth, score, ("4|7", "<b>"), "`x` | 47\n é", 900, 2.0, 4, 30.0, 10, 0.5
    )


GRID = [
    result(task, length, depth, index, float(length == 1024 or depth in (0.0, 1.0)))
    for task in ("niah", "lines")
    for length in (1024, 2048)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    for index in (0, 1)
]


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path / "folder", SETTINGS)


def test_each_result_is_read_once(store):
    store.append(store.path(0, 2), GRID[:5])
    store.append(store.path(0, 2), GRID[5:8])
    store.append(store.path(1, 2), [GRID[7], *GRID[8:]])
    found = read_results(store.folder)
    assert sorted(map(str, found)) == sorted(map(str, GRID))


def test_an_unfinished_last_line_is_overwritten(store):
    path = store.path(0, 1)
    store.append(path, GRID[:3])
    whole = path.read_bytes()
    for kept in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 1, 10, 0):
        path.write_bytes(whole[:kept])
        assert read_results(store.folder) == sorted(GRID[: whole[:kept].count(b"\n")], key=lambda one: one.depth)
        store.append(path, [GRID[5]])
        assert len(read_results(store.folder)) == whole[:kept].count(b"\n") + 1
        assert path.read_bytes().endswith(b"\n")


def test_damaged_lines_and_lines_of_other_evaluations_are_refused(store, tmp_path):
    store.append(store.path(0, 1), GRID[:2])
    whole = store.path(0, 1).read_bytes()
    store.path(0, 1).write_bytes(whole + b'{"task": 1}\n')
    with pytest.raises(ValueError, match=r"results-00000-of-00001.jsonl', line 3"):
        read_results(store.folder)
    store.path(0, 1).write_bytes(whole)
    other = ResultStore(tmp_path / "other", {**SETTINGS, "seed": 1})
    other.append(other.path(0, 2), GRID[:2])
    shutil.copy(other.path(0, 2), store.folder)
    with pytest.raises(ValueError, match=r"results-00000-of-00002.jsonl', line 1"):
        read_results(store.folder)


def test_settings_without_results_can_be_replaced(tmp_path):
    first = ResultStore(tmp_path, SETTINGS)
    other = ResultStore(tmp_path, {**SETTINGS, "seed": 1})
    with pytest.raises(ValueError, match="have seed = 1, but this evaluation has 0"):
        first.append(first.path(0, 2), GRID[:1])  # they have begun at the same time
    other.append(other.path(1, 2), GRID[:1])
    assert len(read_results(other.folder)) == 1


def test_summary_of_a_grid():
    summary = summarize(GRID)
    assert summary.scores["niah", 1024].mean == 100.0
    assert summary.averages == {1024: 100.0, 2048: 40.0}
    assert summary.effective_length is None  # these are not RULER's tasks
    assert summary.weighted_inc == pytest.approx(60.0)
    assert summary.weighted_dec == pytest.approx(80.0)
    assert list(summary.heat_maps) == ["all", "niah", "lines"]
    np.testing.assert_array_equal(summary.heat_maps["niah"].scores, [[100] * 5, [100, 0, 0, 0, 100]])
    assert summary.perplexities[None, None] == pytest.approx((math.exp(0.5), math.exp(3.0)))
    logged = summary.logged()
    assert logged["niah/2048"] == 40.0
    assert logged["other_perplexity"] == pytest.approx(math.exp(3.0))
    json.dumps(summary.as_json())


def test_unmeasured_values_are_missing_and_not_0():
    summary = summarize([*GRID[:4], result("vt", 4096, None, 0, 0.0)])
    assert summary.averages == {}
    assert not [name for name in summary.logged() if name.startswith(("average", "weighted", "effective"))]
    assert np.isnan(summary.heat_maps["niah"].scores).any()
    assert summarize([]).logged() == {}
    generated = [replace(one, answer_nll=None, other_nll=None, answer_tokens=0, other_tokens=0) for one in GRID]
    assert summarize(generated).perplexities == {}
    assert "answer_perplexity" not in summarize(generated).as_json()["tasks"]["niah"]["1024"]


def test_perplexities_by_length_and_task():
    longer = [
        replace(one, answer_nll=8.0, answer_tokens=2) for one in GRID if one.length == 2048 and one.task == "niah"
    ]
    summary = summarize([*GRID, *[replace(one, index=one.index + 2) for one in longer]])
    logged, tasks = summary.logged(), summary.as_json()["tasks"]
    assert logged["answer_perplexity/1024"] == pytest.approx(math.exp(0.5))
    assert logged["answer_perplexity/2048"] == pytest.approx(math.exp((20 * 2 + 10 * 8) / (20 * 4 + 10 * 2)))
    assert tasks["niah"]["2048"]["answer_perplexity"] == pytest.approx(math.exp((10 * 2 + 10 * 8) / (10 * 4 + 10 * 2)))
    assert tasks["lines"]["2048"]["answer_perplexity"] == pytest.approx(math.exp(0.5))
    assert logged["other_perplexity/2048"] == pytest.approx(math.exp(3))


@pytest.mark.parametrize(("nll", "perplexity"), [(4e6, math.inf), (math.nan, math.nan)])
def test_perplexities_of_a_diverged_model(nll, perplexity):
    assert summarize([replace(GRID[0], other_nll=nll)]).logged()["other_perplexity"] == pytest.approx(
        perplexity, nan_ok=True
    )


def test_tasks_without_requested_depths_do_not_bias_the_heat_map():
    """Or the front would look hard because of a task that is hard and always there."""
    hard = [
        replace(result("first", length, 0.0, index, 0.0), asked_depth=None)
        for length in (1024, 2048)
        for index in (0, 1)
    ]
    summary = summarize([*GRID, *hard])
    np.testing.assert_array_equal(summary.heat_maps["all"].scores, summarize(GRID).heat_maps["all"].scores)
    assert summary.heat_maps["first"].scores[0, 0] == 0
    drawn = [replace(one, asked_depth=None) for one in GRID]
    assert summarize(drawn).heat_maps["all"].scores[1, 5] == 0


def test_the_report_has_numbers_answers_and_figures(tmp_path):
    assert not set(drawn_heat_maps(summarize(GRID)))  # a cell has two questions
    more = [replace(one, index=one.index + 100 * copy) for one in GRID for copy in range(1, 10)]
    few = [one for one in more if one.task != "lines" or one.length == 1024 or one.index < 300]
    write_task_report(tmp_path / "more", [*GRID, *few], SETTINGS, missing=0)
    assert {path.stem for path in (tmp_path / "more" / "figures").iterdir()} >= {"heat_map", "heat_maps"}
    write_task_report(tmp_path, GRID, SETTINGS, missing=3)
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["average"] == {"1024": 100.0, "2048": 40.0}
    assert numbers["missing"] == 3
    assert numbers["tasks"]["lines"]["2048"]["questions"] == 10
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "3 questions have no result yet" in page
    assert page.count("data:image/svg+xml") == 2
    assert not re.search(r"(src|href)=.?https?:", page)
    text = (tmp_path / "report.md").read_text()
    assert r"4\|7" in text
    assert re.search(r"\| average \| 100.0 \[\d+, 100\] \| 40.0 \[\d+, \d+\] \|", text)
    assert "| lines | 1.649 / 20.09 | 1.649 / 20.09 |" in text
    for figure in (tmp_path / "figures").iterdir():
        xml.dom.minidom.parse(str(figure))


@pytest.mark.slow
def test_the_report_fits_every_screen(tmp_path):
    write_task_report(tmp_path, GRID, {**SETTINGS, "haystack": None}, missing=0)
    with launch_chromium() as browser:
        check_page(browser, tmp_path / "report.html")


def test_synthetic_text_is_reported():
    assert len(describe_synthetic_text({"multi_document_qa", "vt"}, {})) == 1
    assert len(describe_synthetic_text({"niah_single_2"}, {})) == 1
    assert describe_synthetic_text({"niah_single_1"}, {}) == [], "noise, as in RULER"
    assert describe_synthetic_text({"niah_single_2"}, {"haystack": "sha256:1"}) == []
    assert describe_synthetic_text({"multi_document_qa"}, {"nq_open": "sha256:1"}) == []


def test_blank_answers_are_marked():
    rows = [replace(result(), prediction=text) for text in ("", " \n", "<|im_end|>")]
    assert [row[-1] for row in answer_table(rows).rows] == ["(nothing)", "(only white space)", "`<|im_end|>`"]
    assert answer_table(rows).head[-1] == "likeliest tokens"
    assert answer_table([replace(row, answer_nll=None) for row in rows]).head[-1] == "answer"
