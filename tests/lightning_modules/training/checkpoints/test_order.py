"""Steps decide which checkpoint is the newest, whatever happened to the files."""

import os

import pytest
import torch

from lightning_modules.training.checkpoints.io import describe_checkpoint, find_checkpoints, newest_checkpoint
from lightning_modules.training.checkpoints.sharded import UNSHARDED_FILE
from tests.support.faults import Evil


def save(path, step, run="a", *, time=None, **extra):
    content = {"state_dict": {}, "optimizer_states": [], "global_step": step, **extra}
    path.parent.mkdir(exist_ok=True)
    torch.save(content | ({} if run is None else {"run_id": run}), path)
    if time is not None:
        os.utime(path, (time, time))
    return path


def save_sharded(path, step, *, time):
    path.mkdir()
    (path / ".metadata").write_bytes(b"")
    torch.save({"global_step": step, "run_id": "a"}, path / UNSHARDED_FILE)
    os.utime(path, (time, time))
    return path


def test_the_largest_step_is_the_newest_whatever_the_times_and_names(tmp_path):
    save_sharded(tmp_path / "a.ckpt", 8, time=20)
    save_sharded(tmp_path / "b.ckpt", 12, time=10)
    save(tmp_path / "step-99.ckpt", 10, time=4e9)  # a clock that was ahead
    save(tmp_path / "checkpoints" / "step-9.ckpt", 100, time=5)
    assert [one.step for one in find_checkpoints(tmp_path)] == [100, 12, 10, 8]
    assert newest_checkpoint(tmp_path).name == "step-9.ckpt"


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-7", 7), ("epoch=1-step=8", 8), ("step8-v2", 8), ("weights-9-v1", 9), ("last", float("inf"))],
)
def test_the_name_tells_the_step_of_a_damaged_one(tmp_path, name, step):
    (tmp_path / f"{name}.ckpt").write_bytes(b"PK")
    assert describe_checkpoint(tmp_path / f"{name}.ckpt")[1:] == (step, None)


def test_a_second_file_of_a_step_is_the_newer_one(tmp_path):
    save(tmp_path / "step-3.ckpt", 3, time=20)
    second = save(tmp_path / "step-3-v1.ckpt", 3, time=10)
    save(tmp_path / "step-3-v0.ckpt", 3, time=30)
    assert newest_checkpoint(tmp_path) == second


def test_checkpoints_of_two_runs_in_a_folder_are_refused(tmp_path):
    save(tmp_path / "step-3.ckpt", 3, "a")
    save(tmp_path / "step-2.ckpt", 2, None)  # of an earlier version
    assert newest_checkpoint(tmp_path).name == "step-3.ckpt"
    save(tmp_path / "step-4.ckpt", 4, "b")
    with pytest.raises(ValueError, match=r"step-3\.ckpt of run a.*step-4\.ckpt of run b"):
        newest_checkpoint(tmp_path)


def test_no_tensor_is_read_for_the_step_and_no_code_runs(tmp_path, monkeypatch):
    seen, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *_, **options: seen.append(options) or load(*_, **options))
    path = save(tmp_path / "step-3.ckpt", 4, weight=torch.zeros(10))
    assert describe_checkpoint(path).step == 4
    assert seen == [{"map_location": "cpu", "mmap": True, "weights_only": True}]
    save(path, 4, code=Evil(str(tmp_path / "ran")))
    assert describe_checkpoint(path).step == 3, "by its name"
    assert not (tmp_path / "ran").exists()
