"""``longce evaluate`` from end to end."""

import json

import pytest

from lightning_modules.commands import evaluate as command
from lightning_modules.commands.cli.main import main
from lightning_modules.commands.evaluate import evaluate
from lightning_modules.commands.models import evaluate_models
from lightning_modules.tasks.evaluation import evaluation
from lightning_modules.tasks.evaluation.evaluation import ResultStore, read_results
from tests.support.bars import replace_bars
from tests.support.toy_tasks import GUESS, SEVERAL

TASKS = {"tasks": [GUESS, SEVERAL], "lengths": [48, 64], "samples": 3, "depths": 3}
QUESTIONS = 2 * 3 * 3 + 2 * 3


@pytest.fixture
def asked(monkeypatch):
    """How many questions were put, run by run."""
    counts, put = [], evaluation.put_questions

    def counted(backbone, prompter, questions, mode, **settings):
        counts.append(len(questions))
        return put(backbone, prompter, questions, mode, **settings)

    monkeypatch.setattr(evaluation, "put_questions", counted)
    return counts


def results(folder):
    found = read_results(folder)
    return sorted(str({**vars(one), "seconds": 0}) for one in found)


@pytest.mark.slow
def test_the_command_line(guessing_dir, tmp_path, capsys):
    words = ["--model", guessing_dir, "--output", tmp_path / "out", "--tasks", GUESS, SEVERAL, "--lengths", 48, 64]
    main(["evaluate", *map(str, words), "--samples", "3", "--depths", "3", "--mode", "generate"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["task", "48", "64"]
    assert [line.split()[0] for line in table[2:5]] == ["guess", "several", "average"]
    assert f"{QUESTIONS} questions in" in "".join(table)
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    assert numbers["missing"] == 0
    assert numbers["tasks"]["guess"]["48"]["questions"] == 9
    assert 0 < numbers["average"]["48"] <= 100
    assert (tmp_path / "out" / "figures" / "heat_map.svg").is_file()


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_where_it_was(guessing_dir, tmp_path, asked, monkeypatch):
    evaluate(str(guessing_dir), str(tmp_path / "whole"), mode="teacher_forced", **TASKS)
    append, calls = ResultStore.append, []

    def failing(store, path, parts):
        calls.append(len(parts))
        append(store, path, parts)
        if len(calls) == 2:  # killed while it writes the last of these lines
            path.write_bytes(path.read_bytes()[:-30])
            raise KeyboardInterrupt

    monkeypatch.setattr(ResultStore, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(str(guessing_dir), str(tmp_path / "cut"), mode="teacher_forced", **TASKS)
    monkeypatch.setattr(ResultStore, "append", append)
    asked.clear()
    text = evaluate(str(guessing_dir), str(tmp_path / "cut"), mode="teacher_forced", **TASKS)
    assert sum(asked) == QUESTIONS - sum(calls) + 1
    assert "no result yet" not in text
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    asked.clear()
    more = {**TASKS, "samples": 4}
    evaluate(str(guessing_dir), str(tmp_path / "cut"), mode="teacher_forced", **more)
    assert sum(asked) == QUESTIONS // 3


@pytest.mark.slow
def test_processes_share_the_questions_of_a_folder(guessing_dir, tmp_path, asked, monkeypatch):
    evaluate(str(guessing_dir), str(tmp_path / "one"), mode="teacher_forced", **TASKS)
    monkeypatch.setenv("WORLD_SIZE", "3")
    texts = []
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        asked.clear()
        texts.append(evaluate(str(guessing_dir), str(tmp_path / "three"), mode="teacher_forced", **TASKS))
        assert sum(asked) == QUESTIONS // 3
    assert f"{2 * QUESTIONS // 3} questions have no result yet" in texts[0]
    assert "no result yet" not in texts[2]
    assert results(tmp_path / "three") == results(tmp_path / "one")


@pytest.mark.slow
def test_a_folder_of_other_settings_is_refused_before_the_model_is_loaded(guessing_dir, tmp_path, monkeypatch):
    evaluate(str(guessing_dir), str(tmp_path), mode="teacher_forced", **TASKS)
    monkeypatch.setattr(command, "load_scorer", None)
    with pytest.raises(ValueError, match="mode = 'teacher_forced', but this evaluation has 'generate'"):
        evaluate(str(guessing_dir), str(tmp_path), mode="generate", **TASKS)
    evaluate(str(guessing_dir), str(tmp_path), mode="teacher_forced", **{**TASKS, "samples": 2})  # nothing is missing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [8]}, "8 tokens is too short for 'guess'"),
        ({"device": "tpu7"}, "not available"),
        ({"chat_template": True}, "has no chat template"),
        ({"haystack": "nowhere"}, "nowhere"),
        ({"squad": "nowhere"}, r"nowhere' cannot be read \(No such file"),
        ({"mode": "forced"}, "`mode` must be one of generate, teacher_forced, got 'forced'"),
        ({"model": "/nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(guessing_dir, tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(command, "load_scorer", None)
    with pytest.raises(ValueError, match=message):
        evaluate(**{"model": str(guessing_dir), "output": str(tmp_path / "out"), **TASKS, **settings})


@pytest.mark.parametrize(("rank", "processes"), [("1", "1"), ("-1", "2"), ("x", "2")])
def test_a_process_without_a_place(guessing_dir, tmp_path, monkeypatch, rank, processes):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=f"RANK must be 0 or more .* got '{rank}' and '{processes}'"):
        evaluate(str(guessing_dir), str(tmp_path), **TASKS)


@pytest.mark.slow
def test_texts_that_have_changed_are_other_questions(guessing_dir, tmp_path):
    essays, moved = tmp_path / "essays", tmp_path / "moved"
    essays.mkdir()
    (essays / "a.txt").write_text("ba ce. Di fo gu. Ka le.")

    def run(haystack):
        evaluate(str(guessing_dir), str(tmp_path / "out"), mode="teacher_forced", haystack=str(haystack), **TASKS)

    run(essays)
    run(essays.rename(moved))
    (moved / "a.txt").write_text("ba ce. Di fo gu. Ka mi.")
    with pytest.raises(ValueError, match=r"haystack = 'sha256:\w+', but this evaluation has 'sha256:"):
        run(moved)


def test_long_questions_are_made_a_few_at_a_time(guessing_dir, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 150)
    evaluate(str(guessing_dir), str(tmp_path), mode="teacher_forced", **{**TASKS, "tasks": [SEVERAL], "depths": None})
    assert asked == [3, 2, 1]  # 48 tokens each, and 64


def test_a_number_of_depths_that_is_none(guessing_dir, tmp_path, capsys):
    words = ["--model", str(guessing_dir), "--output", str(tmp_path), "--tasks", GUESS, "--depths", "2.5"]
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *words])
    assert stopped.value.code == 2
    assert "must be distinct, from 0 (front) to 1 (end), got [2.5]" in capsys.readouterr().err


@pytest.mark.limit(5)
def test_several_models_have_folders_and_one_table(guessing_dir, model_dir, tmp_path, monkeypatch, capsys):
    words = ["--output", str(tmp_path / "out"), "--tasks", GUESS, "--lengths", "48", "--samples", "3"]
    words += ["--mode", "teacher_forced"]
    main(["evaluate", "--model", str(guessing_dir), f"--model={model_dir}", *words])
    one, other = guessing_dir.name, model_dir.name
    text = capsys.readouterr().out
    assert f"{other} - {one}" in text.splitlines()[0]
    assert (tmp_path / "out" / one / "report.html").is_file()
    with pytest.raises(ValueError, match="names a model twice"):
        evaluate_models([str(model_dir)] * 2, output=str(tmp_path))
    monkeypatch.setattr(command, "load_scorer", None)
    with pytest.raises(SystemExit):  # the second model is missing: the first is not even loaded
        main(["evaluate", "--model", str(model_dir), "--model", str(tmp_path / "missing"), *words])


@pytest.mark.limit(5)
def test_methods_of_one_model_are_compared(guessing_dir, tmp_path, capsys):
    words = ["evaluate", "--model", str(guessing_dir), "--output", str(tmp_path / "out"), "--tasks", GUESS]
    words += ["--lengths", "48", "--samples", "3", "--mode", "teacher_forced", "--context_extension", "null"]
    words += ["--context_extension={method: pi, original_length: 128, target_length: 512}"]
    main(words)
    name = guessing_dir.name
    assert f"{name}-pi-512 - {name}" in capsys.readouterr().out.splitlines()[0]
    settings = json.loads((tmp_path / "out" / f"{name}-pi-512" / "settings.json").read_text())
    assert settings["identity"].endswith("with pi(original_length=128, target_length=512)")
    with pytest.raises(SystemExit):
        main([*words, words[-1]])
    assert f"the name '{name}-pi-512'" in capsys.readouterr().err


@pytest.mark.limit(5)
@pytest.mark.parametrize("mode", ["generate", "teacher_forced"])
def test_progress_is_counted_in_tokens_within_a_question(mode, guessing_dir, tmp_path, monkeypatch):
    bars = replace_bars(monkeypatch, evaluation)
    evaluate(str(guessing_dir), str(tmp_path), mode=mode, **TASKS)
    (bar,) = bars
    assert bar.total == 12 * 48 + 12 * 64
    assert bar.seen[-2:] == [bar.total, "closed"]
    assert 0 < bar.seen[0] < 12 * 48  # before the first answers
    assert bar.lines[-1] == "tasks, 24 of 24 questions answered"
