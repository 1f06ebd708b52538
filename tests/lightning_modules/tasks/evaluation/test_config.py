"""Options of an evaluation that contradict each other, or that none of the tasks reads."""

import pytest

from longce.evaluate import evaluate


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tasks": []}, "tasks"),
        ({"lengths": []}, "lengths"),
        ({"gen_kwargs": "heat=1"}, "gen_kwargs"),
        ({"gen_kwargs": {"until": ["x"]}}, "gen_kwargs"),
        ({"gen_kwargs": "temperature=1", "mode": "teacher_forced"}, "gen_kwargs"),
        ({"fewshot_as_multiturn": True, "tasks": ["letter"]}, "fewshot_as_multiturn"),
        ({"limit": 3, "log_samples": True}, "limit`, `log_samples"),
        ({"depths": 3, "tasks": ["letter"]}, "depths"),
    ],
)
def test_contradicting_options_are_refused(options, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        evaluate("model", "out", **{"tasks": ["passkey"], **options})


def test_harness_tasks_need_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'ruler'.*\[eval\]"):
        evaluate("model", "out", tasks=["rulr"])
