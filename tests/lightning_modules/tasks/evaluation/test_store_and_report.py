import math
import re
import shutil
import xml.dom.minidom
from dataclasses import replace

import numpy as np
import pytest

from lightning_modules.scoring.records import Source
from lightning_modules.tasks.evaluation.answers import Answer, Setting, read_answers, split_evaluations, write_answers
from lightning_modules.tasks.evaluation.evaluation import AnswerStore
from lightning_modules.tasks.evaluation.report import (
    POSITION_NOTE,
    answer_table,
    as_text,
    describe_synthetic_text,
    drawn_heat_maps,
    position_table,
    write_task_report,
)
from lightning_modules.tasks.evaluation.summary import summarize
from tests.support.browser import check_page, launch_chromium

MODEL = Source("a/b", "sha256:1", "t", "float32", "sdpa", "none", special_tokens=True)
SETTING = Setting(mode="teacher_forced")


def result(task="niah", length=1024, depth=0.0, index=0, score=1.0):
    given = (score, ("4|7", "<b>"), "`x` | 47\n é", 900, 2.0, 4, 30.0, 10, 0.5)
    return Answer(task, length, depth, index, depth, *given, model=MODEL, setting=SETTING)


GRID = [
    result(task, length, depth, index, float(length == 1024 or depth in (0.0, 1.0)))
    for task in ("niah", "lines")
    for length in (1024, 2048)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    for index in (0, 1)
]


UNANSWERED = Answer("niah", 4096, None, 3, model=MODEL, setting=SETTING)


@pytest.fixture
def store(tmp_path):
    return AnswerStore(tmp_path, MODEL, SETTING)


def add(store, answers, rank=0, processes=1):
    """Answers without what identifies them, one by one, in a file of their own."""
    store.begin_file(rank, processes)
    for answer in answers:
        store.append([replace(answer, model=Source(), setting=Setting())])


def test_a_file_gives_back_its_answers(tmp_path):
    odd = replace(result(), asked_depth=None, depth=None, answer_nll=None, other_nll=math.inf, right_answers=())
    setting = Setting("generate", 1, True, "Be brief.", '{"seed": 1}', 3, "a", "b", "c", "d")
    answers = [result(), replace(odd, setting=setting, stage="val", step=7), UNANSWERED]
    write_answers(tmp_path / "a.parquet", answers)
    found = read_answers(tmp_path / "a.parquet")
    assert repr(found) == repr(answers)  # NaN is not equal to itself
    assert split_evaluations(found) == [[found[0], found[2]], [found[1]]]
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"b.parquet' is not a file of answers"):
        read_answers(tmp_path / "b.parquet")


def test_each_answer_is_read_once(store):
    add(store, GRID[:5], 0, 2)
    add(store, GRID[5:8], 0, 2)  # a second file
    add(store, [GRID[7], *GRID[8:]], 1, 2)
    assert sorted(map(str, store.read())) == sorted(map(str, GRID))
    assert len(list(store.folder.glob("*.parquet"))) == 3


def test_damaged_files_and_those_of_other_evaluations_are_refused(store, tmp_path):
    add(store, GRID[:2])
    (file,) = store.folder.glob("*.parquet")
    other = AnswerStore(tmp_path / "other", MODEL, SETTING._replace(seed=1))
    add(other, GRID[:2], 0, 2)
    shutil.copy(next(other.folder.glob("*.parquet")), store.folder)
    with pytest.raises(ValueError, match=r"00000-of-00002-00000.parquet' have seed = 1, but this evaluation has 0"):
        store.read()
    (store.folder / "00000-of-00002-00000.parquet").write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"00000-of-00002-00000.parquet' is not a file of answers"):
        AnswerStore(tmp_path, MODEL, SETTING)


@pytest.mark.parametrize(
    ("model", "setting", "named"),
    [
        (MODEL._replace(identity="sha256:2"), SETTING, "identity"),
        (MODEL._replace(dtype="bfloat16"), SETTING, "dtype"),
        (MODEL._replace(special_tokens=False), SETTING, "add_special_tokens"),
        (MODEL, SETTING._replace(mode="generate"), "mode"),
    ],
)
def test_an_evaluation_that_began_at_the_same_time_with_other_settings_is_refused(tmp_path, model, setting, named):
    first = AnswerStore(tmp_path, MODEL, SETTING)
    other = AnswerStore(tmp_path, model, setting)
    add(first, GRID[:1], 0, 2)
    with pytest.raises(ValueError, match=f"have {named} = "):
        add(other, GRID[1:2], 1, 2)


def test_answers_are_those_of_a_model_wherever_its_folder_is(tmp_path):
    add(AnswerStore(tmp_path, MODEL, SETTING), GRID[:1], 0, 2)
    moved = AnswerStore(tmp_path, MODEL._replace(name="./moved"), SETTING)
    add(moved, GRID[1:2], 1, 2)
    assert [answer.key for answer in moved.read()] == [answer.key for answer in GRID[:2]]
    assert {answer.model.name for answer in moved.read()} == {"./moved"}, "they are one evaluation"


def test_answers_of_other_code_of_a_task_are_refused(tmp_path):
    first = AnswerStore(tmp_path, MODEL, SETTING, {"niah": "", "own": "sha256:1"})
    add(first, [result("own"), result("niah")])
    assert [answer.task_code for answer in first.read()] == ["sha256:1", ""]
    assert len(AnswerStore(tmp_path, MODEL, SETTING, {"niah": "", "other": "sha256:3"}).read()) == 2
    with pytest.raises(ValueError, match=r"have code of the task 'own' = 'sha256:1', but this .* has 'sha256:2'"):
        AnswerStore(tmp_path, MODEL, SETTING, {"own": "sha256:2"})


def test_answers_of_an_earlier_version_are_refused(tmp_path):
    (tmp_path / "results-00000-of-00001.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"jsonl' has answers of longce 0.1: choose another folder"):
        AnswerStore(tmp_path, MODEL, SETTING)


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
    assert summary.cells()["niah", "2048"] == summary.scores["niah", 2048][:2]
    assert summary.cells()["average", "2048"] == (40.0, summary.average_intervals[2048])


def test_unmeasured_values_are_missing_and_not_0():
    summary = summarize([*GRID[:4], result("vt", 4096, None, 0, 0.0)])
    assert summary.averages == {}
    assert not [name for name in summary.logged() if name.startswith(("average", "weighted", "effective"))]
    assert np.isnan(summary.heat_maps["niah"].scores).any()
    assert summarize([]).logged() == {}
    generated = [replace(one, answer_nll=None, other_nll=None, answer_tokens=0, other_tokens=0) for one in GRID]
    assert summarize(generated).perplexities == {}
    unfinished = summarize([*GRID, UNANSWERED])
    assert unfinished.missing == 1
    assert unfinished.logged() == summarize(GRID).logged()


def test_perplexities_by_length_and_task():
    longer = [
        replace(one, answer_nll=8.0, answer_tokens=2) for one in GRID if one.length == 2048 and one.task == "niah"
    ]
    summary = summarize([*GRID, *[replace(one, index=one.index + 2) for one in longer]])
    logged = summary.logged()
    by_task = {place: found.answer_perplexity for place, found in summary.perplexities.items()}
    assert logged["answer_perplexity/1024"] == pytest.approx(math.exp(0.5))
    assert logged["answer_perplexity/2048"] == pytest.approx(math.exp((20 * 2 + 10 * 8) / (20 * 4 + 10 * 2)))
    assert by_task["niah", 2048] == pytest.approx(math.exp((10 * 2 + 10 * 8) / (10 * 4 + 10 * 2)))
    assert by_task["lines", 2048] == pytest.approx(math.exp(0.5))
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
    write_task_report(tmp_path / "more", [*GRID, *few])
    assert {path.stem for path in (tmp_path / "more" / "figures").iterdir()} >= {"heat_map", "heat_maps"}
    summary = write_task_report(tmp_path, [*GRID, *[UNANSWERED] * 3])
    assert summary.averages == {1024: 100.0, 2048: 40.0}
    assert summary.scores["lines", 2048].questions == 10
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
def test_positions_are_compared_only_if_depths_were_requested(tmp_path):
    up = [result("qa", 2048, depth, index, 1 - depth) for depth in (0.0, 0.5, 1.0) for index in range(4)]
    summary = write_task_report(tmp_path, up)
    assert position_table(summary).rows == [("qa", "2k", "100.0 [7, 100]", "100.0 at 0.00", "0.0 at 1.00")]
    text = as_text(summary, up[0].settings)
    assert f"{POSITION_NOTE}\ntask" in text
    for written in (text, *((tmp_path / name).read_text() for name in ("report.md", "report.html"))):
        assert "100.0 [7, 100]" in written
    drawn = [replace(one, asked_depth=None) for one in up]
    assert "worst" not in as_text(write_task_report(tmp_path, drawn), up[0].settings)
    assert "worst" not in (tmp_path / "report.md").read_text()


def test_the_report_fits_every_screen(tmp_path):
    write_task_report(tmp_path, GRID)
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
    assert answer_table([*rows, UNANSWERED]).rows == answer_table(rows).rows
    assert answer_table(rows).head[-1] == "likeliest tokens"
    assert answer_table([replace(row, answer_nll=None) for row in rows]).head[-1] == "answer"
