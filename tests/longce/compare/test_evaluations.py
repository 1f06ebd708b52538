"""Scores of several models in one table, with differences over the same questions."""

import math
from dataclasses import replace

import pandas as pd
import pytest

from lightning_modules.tasks.evaluation.answers import write_answers
from lightning_modules.utilities.statistics import score_difference
from longce.cli.main import main
from longce.compare.command import compare
from longce.compare.evaluations import ComparedEvaluation, draw_scores, judge_differences, subtract_scores
from tests.support.answers import make_answers, write_evaluation, write_harness

FIRST = [1, 1, 0, 1, 1, 0, 1, 1, 0, 1]
SECOND = [1, 0, 0, 1, 0, 0, 1, 1, 0, 0]


def write(folder, scores, **about):
    """A folder of `longce evaluate` with one task at one length."""
    return write_evaluation(folder, {("needle", 64): scores}, model=folder.name, **about)


def test_the_difference_is_over_the_same_questions(tmp_path):
    one, other = write(tmp_path / "a", FIRST), write(tmp_path / "b", [*SECOND[:8], math.nan])  # not answered
    text = compare([one, other], tmp_path / "page.html")
    value, (low, high) = score_difference(SECOND[:8], FIRST[:8])
    assert text.splitlines()[0] == "Compared with a, b shows no difference in any of 1 cells."
    text = text.partition("\n\n")[2]
    assert text.splitlines()[0].split() == ["task", "length", "or", "metric", "a", "b", "b", "-", "a"]
    assert "The text around the needles of needle is synthetic" in text
    assert "1 questions of b have no result yet." in text
    row = text.splitlines()[2]
    assert row.split()[:3] == ["needle", "64", "70.0"]
    assert row.endswith(f"{100 * value:+.1f} [{100 * low:+.0f}, {100 * high:+.0f}]")
    assert "b - a" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"attention": "eager"}, {"precision": "not recorded"}])
def test_answers_of_other_numerics_have_no_difference(tmp_path, changed):
    numerics = {"dtype": "float32", "attention": "sdpa", "precision": "none"}
    one = write(tmp_path / "a", FIRST)
    same = write(tmp_path / "same", SECOND)
    other = write(tmp_path / "b", SECOND, numerics=(numerics | changed).values())
    text = compare([one, same, other])
    assert "same - a" in text
    assert "b - a" not in text
    assert "Compared with a, b" not in text
    ((key, value),) = changed.items()
    assert f"{numerics[key]} (`a`, `same`) against {value} (`b`)" in text
    assert ("The precision of `b` is not recorded" in text) == (value == "not recorded")


def test_the_verdict_names_tasks_by_their_intervals(tmp_path):
    good, bad = [1] * 10, [0] * 10
    one = write(tmp_path / "a", bad)
    better, worse = write(tmp_path / "b", good), write(tmp_path / "c", bad)
    text = compare([one, better, worse], tmp_path / "page.html")
    assert text.startswith("Compared with a, b is better in 1 of 1 cells (needle). Compared with a, c shows no")
    assert "<code>a</code> is worse in 1 of 1 cells (needle)." in page_of(tmp_path, [better, one])


def page_of(folder, evaluations):
    compare(evaluations, folder / "page.html")
    return (folder / "page.html").read_text()


def test_other_questions_have_no_difference(tmp_path, capsys):
    write(tmp_path / "runs" / "a", FIRST)
    write(tmp_path / "runs" / "b", SECOND, seed=1)
    main(["compare", str(tmp_path / "runs")])
    text = capsys.readouterr().out
    assert "b and a got different questions (seed)." in text
    assert "b - a" not in text


def test_a_task_of_other_code_has_no_difference(tmp_path):
    scores = {("needle", 64): FIRST, ("own.Task", 64): FIRST}
    folders = []
    for name in ("a", "b"):
        answers = [
            replace(answer, task_code=f"sha256:{name}") if answer.task == "own.Task" else answer
            for answer in make_answers(scores, model=name)
        ]
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        write_answers(folders[-1] / "answers.parquet", answers)
    text = compare(folders)
    assert "in any of 1 cells" in text
    assert "b and a ran different code of own.Task." in text


def test_metrics_of_the_harness_are_next_to_ours(tmp_path):
    folder = write(tmp_path / "a", FIRST)
    metrics = {"race": {"alias": "race", "acc,none": 0.5, "acc_stderr,none": 0.1}}
    write_harness(folder / "results_2026.json", metrics, tasks=["short", "race"])
    text = compare([folder, f"plain={write(tmp_path / 'b', SECOND)}"])
    cells = [line.split() for line in text.splitlines()]
    assert ["race", "acc", "0.500"] in cells
    assert ["RACE", "score,", "%", "50.0"] in cells
    write_harness(tmp_path / "results_2026.json", metrics, model="org/other")
    assert f"{tmp_path.name}: org/other (not identified by content)." in compare([tmp_path])
    write_harness(tmp_path / "results_2027.json", {"boolq": metrics["race"]}, model="org/other", shots=2)
    assert "boolq" in compare([tmp_path])
    write_harness(tmp_path / "results_2028.json", metrics, model="org/other")  # the same again
    assert "boolq" in compare([tmp_path])
    for value, model, named in ((0.6, "org/other", "race"), (0.5, "org/third", "two models")):
        write_harness(tmp_path / "results_2028.json", {"race": {"acc,none": value}}, model=model)
        with pytest.raises(ValueError, match=f"different results of {named}"):
            compare([tmp_path])


def test_folders_without_a_complete_evaluation_are_refused_by_what_they_are(tmp_path):
    (tmp_path / "killed" / "answers").mkdir(parents=True)
    with pytest.raises(ValueError, match="killed' was interrupted: run the same `longce evaluate` again"):
        compare([tmp_path / "killed"])
    folder = write(tmp_path / "damaged", FIRST)
    (folder / "answers.parquet").write_bytes((folder / "answers.parquet").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"answers.parquet' is not a file of answers"):
        compare([folder])


def test_answers_of_two_steps_of_a_run_are_compared(tmp_path):
    """Files of `LongContextTasks`; several evaluations in one file have no name each."""
    answers = [make_answers({("needle", 64): scores}, model="", step=n) for n, scores in enumerate((FIRST, SECOND))]
    for step, found in enumerate(answers):
        write_answers(tmp_path / f"val-step-{step}.parquet", found)
    text = compare([tmp_path])
    assert "val-step-1 - val-step-0" in text
    assert "val-step-1: a model in training (" in text
    assert text == compare([tmp_path / f"val-step-{step}.parquet" for step in range(2)])
    write_answers(tmp_path / "both.parquet", answers[0] + answers[1])
    with pytest.raises(ValueError, match=r"both.parquet' has the answers of 2 evaluations"):
        compare([tmp_path / "both.parquet"])


def test_scores_at_several_lengths_are_drawn_with_a_line_for_each_model():
    cells = {
        ("needle", "64"): (90.0, (80.0, 95.0)),
        ("needle", "4096"): (40.0, (30.0, 52.0)),
        ("other", "64"): (1.0, None),
    }
    cells |= {("average", "64"): (50.0, None), ("average", "4096"): (30.0, None), ("harness", "acc"): (0.5, None)}
    found = [ComparedEvaluation(name, cells, pd.DataFrame(), {}, 0, {}) for name in ("first", "second")]
    figures = draw_scores(found)
    assert list(figures) == ["average", "needle"]  # one length is no curve
    assert all(word in figures["needle"] for word in ("first", "second", "4k"))


def test_many_tasks_are_counted_and_chance_is_named():
    cells = {(f"task{number}", length): (50.0, None) for number in range(7) for length in ("64", "128", "256")}
    rows = [(task, length, 0.5, index) for task, length in cells for index in range(12)]
    questions = pd.DataFrame(rows, columns=["task", "length", "asked_depth", "index"]).assign(task_code="")
    first = ComparedEvaluation("first", cells, questions.assign(score=0.0), {}, 0, {})
    better = questions["task"] != "task0"
    second = ComparedEvaluation("second", cells, questions.assign(score=better.astype(float)), {}, 0, {})
    sentence = judge_differences("second", "first", subtract_scores(second, first))
    assert "better in 18 of 21 cells" in sentence
    assert "about 1 would be better" in sentence
