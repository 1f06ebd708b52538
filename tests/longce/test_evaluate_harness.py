import json

import pytest

from lightning_modules.tasks.harness import evaluation
from lightning_modules.tasks.harness.results import summarize_results
from longce.cli.main import main
from longce.compare.command import compare
from longce.correlate.result_files import read_results
from longce.evaluate import evaluate


@pytest.fixture
def asked(monkeypatch):
    """Names of the tasks that a model is asked."""
    names = []
    evaluate = evaluation.evaluate_tasks
    monkeypatch.setattr(
        evaluation,
        "evaluate_tasks",
        lambda model, loaded, **options: names.extend(loaded["tasks"]) or evaluate(model, loaded, **options),
    )
    return names


def test_tasks_with_a_result_are_not_asked_again(model_dir, task_dir, tmp_path, asked, monkeypatch, capsys):
    arguments = ["evaluate", "--model", str(model_dir), "--include_path", str(task_dir), "--limit", "3"]
    arguments += ["--output", str(tmp_path / "out"), "--log_samples", "true", "--tasks", "both"]
    main(arguments)
    first = capsys.readouterr().out
    assert "both" in first
    assert asked == ["choice", "letter"]
    main([*arguments, "answer"])
    assert asked == ["choice", "letter", "answer"]
    (file,) = (tmp_path / "out").glob("results_*.json")
    result = json.loads(file.read_text())
    found = summarize_results(result, ["both", "answer"])
    assert set(found["tasks"]) == {"choice", "letter", "answer"}
    mean = sum(found["tasks"][name]["metrics"]["acc,none"] for name in ("choice", "letter")) / 2
    assert found["groups"]["both"]["acc,none"] == pytest.approx(mean)
    assert found["tasks"]["choice"]["questions"] == 3
    assert "acc_stderr,none" in found["tasks"]["choice"]["metrics"]
    assert result["config"]["tasks"] == ["both", "answer"]
    (entry,) = read_results([str(tmp_path / "out")])
    assert entry.model == str(model_dir)
    assert entry.values["both/acc"].number == pytest.approx(mean)
    assert entry.numerics.is_known
    assert f"{mean:.3f}" in compare([tmp_path / "out"])
    (samples,) = (tmp_path / "out").glob("samples_choice_*.jsonl")
    assert len(samples.read_text().splitlines()) == 3
    # No result is missing: neither the model nor the data are loaded.
    monkeypatch.setattr("longce.evaluate.load_scorer", None)
    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", None)
    capsys.readouterr()
    main(arguments)
    assert capsys.readouterr().out == first


def test_a_killed_evaluation_keeps_finished_tasks(model_dir, task_dir, tmp_path, asked, monkeypatch):
    options = {"tasks": ["choice", "answer", "letter"], "include_path": str(task_dir), "limit": 2}
    with monkeypatch.context() as patch:
        patch.setattr(evaluation.HarnessModel, "generate_until", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(str(model_dir), str(tmp_path), **options)
    assert asked == ["choice", "answer"]
    evaluate(str(model_dir), str(tmp_path), **options)
    assert asked == ["choice", "answer", "answer", "letter"]


def test_other_settings_and_missing_data_are_refused_before_the_model_is_loaded(
    model_dir, task_dir, tmp_path, monkeypatch, capsys
):
    options = {"include_path": str(task_dir), "limit": 2}
    evaluate(str(model_dir), str(tmp_path / "out"), tasks=["letter"], **options)
    monkeypatch.setattr("longce.evaluate.load_scorer", None)
    with pytest.raises(ValueError, match=r"letter\.json.*limit = 2, .* 3"):
        evaluate(str(model_dir), str(tmp_path / "out"), tasks=["letter"], **{**options, "limit": 3})
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--model", str(model_dir), "--tasks", "short", "--output", str(tmp_path / "other")])
    assert stopped.value.code == 2
    assert "'cais/mmlu'" in (said := capsys.readouterr().err)
    assert "HF_HUB_OFFLINE" in said


def test_a_changed_task_file_is_another_task(model_dir, task_dir, tmp_path, asked):
    folder = tmp_path / "tasks"
    folder.mkdir()
    file = folder / "letter.yaml"
    file.write_text((task_dir / "letter.yaml").read_text())
    calls = ({"tasks": [str(file)]}, {"tasks": ["letter"], "include_path": str(folder)})
    for options in (*calls, *calls):
        evaluate(str(model_dir), str(tmp_path / "out"), **options, limit=1)
    assert asked == ["letter", "letter"]
    file.write_text(file.read_text().replace("A, B or C:", "C, B or A:"))
    for options in calls:
        with pytest.raises(ValueError, match=r"letter.*\.json.*task_file = "):
            evaluate(str(model_dir), str(tmp_path / "out"), **options, limit=1)


def test_processes_share_the_tasks(model_dir, task_dir, tmp_path, asked, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = {"tasks": ["letter", "answer"], "include_path": str(task_dir), "limit": 1}
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        evaluate(str(model_dir), str(tmp_path), **options)
        assert asked == ["letter", "answer"][: int(rank) + 1]
    (file,) = tmp_path.glob("results_*.json")
    assert set(json.loads(file.read_text())["results"]) == {"letter", "answer"}
