import pytest
from lm_eval.tasks import TaskManager

from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.harness import tasks
from lightning_modules.tasks.harness.results import SETS, summarize_results
from lightning_modules.tasks.harness.tasks import find_names, load_tasks


def test_sets_consist_of_tasks_of_the_harness():
    manager, names = find_names(["longbench", "short", "race"])
    assert names == [*SETS["longbench"].tasks, *SETS["short"].tasks]
    assert (len(SETS["longbench"].tasks), len(SETS["short"].tasks)) == (16, 6)
    assert len(manager.all_tasks) < 2000  # only a few folders were read, not 14,000 tasks


def table(rows):
    """Results of the harness with these metrics of tasks."""
    counts = {name: {"effective": 1} for name in rows}
    return {"results": rows, "n-samples": counts, "n-shot": dict.fromkeys(rows, 0)}


def test_scores_are_means_of_categories_in_percent():
    rows = {name: {"score,none": 0.5, "alias": name} for name in SETS["longbench"].tasks}
    rows["longbench_passage_count"] = {"score,none": 0.0}
    found = summarize_results(table(rows), ["longbench"])["scores"]
    assert found["Synthetic Tasks"] == 25.0
    assert found["LongBench"] == pytest.approx((5 * 50 + 25) / 6)
    del rows["longbench_lcc"]
    found = summarize_results(table(rows), ["longbench"])["scores"]
    assert "Code Completion" not in found
    assert "LongBench" not in found


def test_unmeasured_lengths_have_no_metric():
    rows = {"niah": {"4096,none": -1.0, "8192,none": 0.5, "acc,none": -1.0, "acc_stderr,none": "N/A"}}
    assert summarize_results(table(rows), [])["tasks"]["niah"]["metrics"] == {"8192,none": 0.5, "acc,none": -1.0}


@pytest.mark.slow
def test_unknown_names_and_missing_data_are_refused(task_dir, tmp_path, monkeypatch):
    # Looking up a name among all tasks of the harness takes 15 s.
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: TaskManager(**{**options, "include_defaults": False}))
    (tmp_path / "bad.yaml").write_text("task: bad\ndataset_path: json\n")
    for name, folder, message in (
        ("chioce", task_dir, "'chioce'.* choice"),
        ("choice", tmp_path / "none", "`include_path`"),
        ("away", task_dir, "'away'.*'nobody/has-this'.*HF_HOME"),
        (str(tmp_path / "bad.yaml"), None, r"bad\.yaml"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tasks(find_names([name], folder and str(folder))[0], name, TaskConfig())
