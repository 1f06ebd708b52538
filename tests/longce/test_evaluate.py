"""``longce evaluate`` from end to end."""

import sys
from dataclasses import replace

import pytest

from lightning_modules.tasks.evaluation import evaluation
from lightning_modules.tasks.evaluation.answers import ANSWERS_FILE, read_answers
from lightning_modules.tasks.evaluation.evaluation import AnswerStore
from lightning_modules.tasks.evaluation.summary import summarize
from longce import evaluate as command
from longce.cli.main import main
from longce.compare.command import compare
from longce.evaluate import evaluate
from longce.models import evaluate_models
from tests.support.bars import replace_bars
from tests.support.toy_tasks import GUESS, SEVERAL

TASKS = {"tasks": [GUESS, SEVERAL], "lengths": [48, 64], "samples": 3, "depths": 3, "mode": "teacher_forced"}
QUESTIONS = 2 * 3 * 3 + 2 * 3


@pytest.fixture
def asked(monkeypatch):
    """Numbers of questions that were asked together."""
    counts, put = [], evaluation.put_questions

    def counted(backbone, prompter, questions, mode, **settings):
        counts.append(len(questions))
        return put(backbone, prompter, questions, mode, **settings)

    monkeypatch.setattr(evaluation, "put_questions", counted)
    return counts


def run(model, folder, **options):
    return evaluate(str(model), str(folder), **{**TASKS, **options})


def results(folder):
    return [replace(one, seconds=0.0) for one in read_answers(folder / ANSWERS_FILE)]


@pytest.mark.slow
def test_command_line(guessing_dir, tmp_path, capsys):
    words = ["--model", guessing_dir, "--output", tmp_path / "out", "--tasks", GUESS, SEVERAL, "--lengths", 48, 64]
    main(["evaluate", *map(str, words), "--samples", "3", "--depths", "3", "--mode", "generate"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["task", "48", "64"]
    assert [line.split()[0] for line in table[2:5]] == ["guess", "several", "average"]
    assert f"{QUESTIONS} questions in" in "".join(table)
    answers = read_answers(tmp_path / "out" / ANSWERS_FILE)
    (settings,) = {str(answer.settings) for answer in answers}
    assert str(guessing_dir) in settings
    summary = summarize(answers)
    assert summary.missing == 0
    assert summary.scores["guess", 48].questions == 9
    assert 0 < summary.averages[48] <= 100
    assert (tmp_path / "out" / "figures" / "depths.svg").is_file()
    lengths = (tmp_path / "out" / "figures" / "lengths.svg").read_text()
    assert "average" in lengths
    assert "RULER" not in lengths, "these are not its tasks"


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes(guessing_dir, tmp_path, asked, monkeypatch):
    run(guessing_dir, tmp_path / "whole")
    append, calls = AnswerStore.append, []

    def failing(store, parts):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(parts))
        append(store, parts)

    monkeypatch.setattr(AnswerStore, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        run(guessing_dir, tmp_path / "cut")
    with pytest.raises(ValueError, match="cut' was interrupted"):
        compare([tmp_path / "cut"])
    monkeypatch.setattr(AnswerStore, "append", append)
    asked.clear()
    text = run(guessing_dir, tmp_path / "cut")
    assert sum(asked) == QUESTIONS - sum(calls)
    assert "no result yet" not in text
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    asked.clear()
    run(guessing_dir, tmp_path / "cut", samples=4)
    assert sum(asked) == QUESTIONS // 3
    asked.clear()
    monkeypatch.setattr(command, "load_scorer", None)
    run(guessing_dir, tmp_path / "cut", samples=2)  # no question is missing: the model is not loaded
    assert not asked


@pytest.mark.slow
def test_answers_of_a_task_whose_code_has_changed_are_not_reused(guessing_dir, tmp_path, asked, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = (
        "from tests.support.toy_tasks import Guess\n\nclass Mine(Guess):\n    name = 'mine'\n    max_new_tokens = {}\n"
    )
    (tmp_path / "my_task.py").write_text(code.format(3))
    run(guessing_dir, tmp_path / "out", tasks=["my_task.Mine"])
    run(guessing_dir, tmp_path / "out", tasks=["my_task.Mine"])
    assert sum(asked) == 2 * 3 * 3, "the second run has the answers of the first"
    (tmp_path / "my_task.py").write_text(code.format(4))
    monkeypatch.delitem(sys.modules, "my_task")
    with pytest.raises(ValueError, match=r"code of the task 'mine' .* choose another folder"):
        run(guessing_dir, tmp_path / "out", tasks=["my_task.Mine"])


@pytest.mark.slow
def test_processes_share_the_questions_of_a_folder(guessing_dir, tmp_path, asked, monkeypatch):
    run(guessing_dir, tmp_path / "one")
    monkeypatch.setenv("WORLD_SIZE", "3")
    texts = []
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        asked.clear()
        texts.append(run(guessing_dir, tmp_path / "three"))
        assert sum(asked) == QUESTIONS // 3
    assert f"{2 * QUESTIONS // 3} questions have no result yet" in texts[0]
    assert summarize(read_answers(tmp_path / "three" / ANSWERS_FILE)).missing == 0
    assert "no result yet" not in texts[2]
    assert results(tmp_path / "three") == results(tmp_path / "one")


@pytest.mark.parametrize(("rank", "processes"), [("1", "1"), ("-1", "2"), ("x", "2")])
def test_impossible_ranks_are_refused(guessing_dir, tmp_path, monkeypatch, rank, processes):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=f"RANK .*'{rank}' and '{processes}'"):
        run(guessing_dir, tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("lengths", [8], "8 tokens"),
        ("device", "tpu7", "tpu7"),
        ("chat_template", True, "chat_template"),
        ("haystack", "nowhere", "nowhere"),
        ("squad", "nowhere", "nowhere"),
        ("depths", [2.5], "depths"),
        ("model", "/nowhere/at/all", "nowhere/at/all"),
        ("tasks", [], "`tasks`"),
        ("tasks", ["letter"], "`depths`"),
        ("lengths", [], "`lengths`"),
        ("gen_kwargs", "heat=1", "`gen_kwargs`"),
        ("gen_kwargs", {"until": ["x"]}, "`gen_kwargs`"),
        ("gen_kwargs", "temperature=1", "`gen_kwargs`"),
        ("limit", 3, "`limit`"),
        ("log_samples", True, "`log_samples`"),
        ("alpha", 1.0, "Only the mode 'key_tokens' reads `alpha`, and this is 'teacher_forced'"),
        ("mode", "key_tokens", r"`context_length` \+ `stride` = 4096 \+ 1024 = 5120 must be below .* 48 tokens"),
    ],
)
def test_unusable_options_are_refused_before_the_model_is_loaded(
    guessing_dir, tmp_path, monkeypatch, option, value, named
):
    monkeypatch.setattr(command, "load_scorer", None)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        evaluate(**{"model": str(guessing_dir), "output": str(tmp_path / "out"), **TASKS, option: value})


@pytest.mark.slow
def test_results_of_other_settings_or_texts_are_refused(guessing_dir, tmp_path):
    essays, moved = tmp_path / "essays", tmp_path / "moved"
    essays.mkdir()
    (essays / "a.txt").write_text("ba ce. Di fo gu. Ka le.")
    run(guessing_dir, tmp_path / "out", haystack=str(essays))
    run(guessing_dir, tmp_path / "out", haystack=str(essays.rename(moved)))
    with pytest.raises(ValueError, match=r"mode = 'teacher_forced'.*'generate'"):
        run(guessing_dir, tmp_path / "out", haystack=str(moved), mode="generate")
    (moved / "a.txt").write_text("ba ce. Di fo gu. Ka mi.")
    with pytest.raises(ValueError, match="haystack = "):
        run(guessing_dir, tmp_path / "out", haystack=str(moved))


def test_harness_tasks_need_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'ruler'.*\[eval\]"):
        evaluate("model", "out", tasks=["rulr"])
    with pytest.raises(ValueError, match="`fewshot_as_multiturn`"):
        evaluate("model", "out", tasks=["letter"], fewshot_as_multiturn=True)


def test_long_questions_are_generated_a_few_at_a_time(guessing_dir, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 150)
    run(guessing_dir, tmp_path, tasks=[SEVERAL], depths=None)
    assert asked == [3, 2, 1]  # 48 tokens each, and 64


def test_several_models_have_folders_and_one_table(guessing_dir, model_dir, tmp_path, monkeypatch, capsys):
    words = ["--output", str(tmp_path / "out"), "--tasks", GUESS, "--lengths", "48", "--samples", "3"]
    words += ["--mode", "teacher_forced"]
    main(["evaluate", "--model", str(guessing_dir), f"--model={model_dir}", *words])
    assert f"{model_dir.name} - {guessing_dir.name}" in capsys.readouterr().out
    assert (tmp_path / "out" / guessing_dir.name / "report.html").is_file()
    with pytest.raises(ValueError, match="twice"):
        evaluate_models([str(model_dir)] * 2, output=str(tmp_path))
    monkeypatch.setattr(command, "load_scorer", None)
    with pytest.raises(SystemExit):  # the second model is missing: the first is not even loaded
        main(["evaluate", "--model", str(model_dir), "--model", str(tmp_path / "missing"), *words])


@pytest.mark.slow
def test_models_as_evaluators(guessing_dir, model_dir, tmp_path, monkeypatch, capsys):
    """A row for each model, from the command and from `compare`; the answers are not asked for again."""
    words = ["--output", str(tmp_path / "out"), "--tasks", GUESS, "--lengths", "48", "64", "--samples", "3"]
    words += ["--mode", "key_tokens", "--context_length", "8", "--stride", "4", "--alpha", "0.05", "--beta", "-4"]
    main(["evaluate", "--model", str(guessing_dir), f"--model={model_dir}", *words])
    printed = capsys.readouterr().out
    heading, _, *rows = printed.splitlines()[:6]
    assert heading.split("  ")[0] == "evaluator"
    assert [row.split()[0] for row in rows] == [guessing_dir.name] * 2 + [model_dir.name] * 2
    assert all("8, 4" in row and "0.05, -4" in row for row in rows)
    folder = tmp_path / "out" / guessing_dir.name
    answers = read_answers(folder / ANSWERS_FILE)
    accuracy = summarize(answers).as_evaluator["guess", 64]
    assert accuracy.answer_tokens == 3
    assert f"{100 * accuracy.by_lsd_and_lcl.balanced:.1f} [" in rows[1]
    for report in ("report.md", "report.html"):
        assert "LCL of answers" in (folder / report).read_text()
    compare([folder], tmp_path / "page.html")
    assert "LCL of answers" in (tmp_path / "page.html").read_text()
    monkeypatch.setattr(command, "load_scorer", None)
    main(["evaluate", "--model", str(guessing_dir), *words[:1], str(folder), *words[2:]])
    assert rows[1] in capsys.readouterr().out
    with pytest.raises(SystemExit):  # other thresholds are another evaluation
        main(["evaluate", "--model", str(guessing_dir), *words[:1], str(folder), *words[2:-1], "-3"])
    assert "beta = -4.0" in capsys.readouterr().err


def test_harness_tasks_have_no_answer_tokens():
    with pytest.raises(ValueError, match=r"do not mark: remove letter"):
        evaluate("model", "out", tasks=["letter"], mode="key_tokens", context_length=8, stride=4)


@pytest.mark.parametrize("mode", [pytest.param("generate", marks=pytest.mark.slow), "teacher_forced"])
def test_progress_is_counted_in_tokens_within_a_question(mode, guessing_dir, tmp_path, monkeypatch):
    bars = replace_bars(monkeypatch, evaluation)
    evaluate(str(guessing_dir), str(tmp_path), **(TASKS | {"mode": mode}))
    (bar,) = bars
    assert bar.total == 12 * 48 + 12 * 64
    assert bar.seen[-2:] == [bar.total, "closed"]
    assert 0 < bar.seen[0] < 12 * 48  # before the first answers
    assert bar.lines[-1] == "tasks, 24 of 24 questions answered"
