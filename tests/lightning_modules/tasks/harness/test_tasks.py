import math
from types import SimpleNamespace

import pytest
from lm_eval.tasks import TaskManager

from lightning_modules.tasks.harness import tasks
from lightning_modules.tasks.harness.evaluation import aggregate, set_scores
from lightning_modules.tasks.harness.tasks import SETS, find_names, load_tasks


def test_sets_consist_of_tasks_of_the_harness():
    manager, names = find_names(["longbench", "short", "race"])
    assert names == [*SETS["longbench"].tasks, *SETS["short"].tasks]
    assert (len(SETS["longbench"].tasks), len(SETS["short"].tasks)) == (16, 6)
    assert len(manager.all_tasks) < 2000  # only a few folders were read, not 14,000 tasks


def test_scores_are_means_of_categories_in_percent():
    one = SETS["longbench"]
    metrics = {name: {"score,none": 0.5} for name in one.tasks}
    metrics["longbench_passage_count"] = {"score,none": 0.0}
    ends = {name: {"score,none": (value["score,none"] - 0.04, 1.0)} for name, value in metrics.items()}
    found, intervals = set_scores(["longbench"], metrics, ends)
    assert found["Synthetic Tasks"] == 25.0
    assert found["LongBench"] == pytest.approx((5 * 50 + 25) / 6)
    # The average of two independent means, each 4 points above the lower end of its interval.
    assert intervals["Synthetic Tasks"][0] == pytest.approx(25 - 4 / math.sqrt(2))
    below = [4 / math.sqrt(len(names)) for names in tasks._LONGBENCH.values()]
    assert intervals["LongBench"][0] == pytest.approx(found["LongBench"] - math.hypot(*below) / 6)
    del metrics["longbench_lcc"]
    found, _ = set_scores(["longbench"], metrics)
    assert "Code Completion" not in found
    assert "LongBench" not in found


def test_unmeasured_lengths_have_no_metric():
    found = {"4096,none": -1.0, "8192,none": 0.5, "acc,none": -1.0, "alias": "ruler"}
    group = SimpleNamespace(name="ruler", get_all_tasks=list, aggregate=lambda metrics: found)
    assert aggregate({"ruler": group}, {}) == {"ruler": {"8192,none": 0.5, "acc,none": -1.0}}


def test_number_of_examples(task_dir):
    def examples(**options):
        loaded = load_tasks(["both"], include_path=str(task_dir), **options)
        return {name: task.get_config("num_fewshot") for name, task in loaded.tasks.items()}

    assert examples() == {"choice": 1, "letter": 0}
    assert examples(num_fewshot=2) == {"choice": 2, "letter": 2}


def test_a_file_is_a_task(task_dir):
    path = str(task_dir / "letter.yaml")
    assert list(load_tasks([path]).tasks) == ["letter"]


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
            load_tasks([name], include_path=folder and str(folder))
