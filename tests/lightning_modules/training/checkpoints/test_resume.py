"""With which checkpoint a run goes on; what the command line says of it is in `tests/test_cli.py`."""

import re
from types import SimpleNamespace

import pytest
import torch
from lightning import Trainer

from callbacks import StepCheckpoint
from lightning_modules.training.checkpoints import resume as run_checkpoints
from lightning_modules.training.checkpoints.resume import (
    check_same_checkpoint,
    find_checkpoint,
    owned_folders,
    would_resume,
)

WEIGHTS = {"state_dict": {}, "pytorch-lightning_version": "2.6.6"}


@pytest.fixture
def trainer(tmp_path):
    return Trainer(logger=False, callbacks=[StepCheckpoint(tmp_path / "own")], accelerator="cpu")


def test_evaluation_of_the_last_checkpoint_needs_one_and_takes_weights_alone(trainer, tmp_path):
    assert find_checkpoint("last", trainer, False) is None
    with pytest.raises(ValueError, match="`ckpt_path: last`"):
        find_checkpoint("last", trainer, False, resume=False)
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "weights.ckpt"
    torch.save(WEIGHTS, path)
    for name in (str(path), str(path.parent), "last"):
        assert find_checkpoint(name, trainer, False, resume=False) == str(path)
        with pytest.raises(ValueError, match="weights only"):
            find_checkpoint(name, trainer, False)


def test_which_command_goes_on_with_what_it_has_saved(trainer, tmp_path):
    given = ["last", str(tmp_path / "own"), None, str(tmp_path), str(tmp_path / "own" / "step-1.ckpt")]
    assert [would_resume(path, trainer) for path in given] == [True, True, False, False, False]
    trainer.checkpoint_callbacks[0].dirpath = str(tmp_path / "checkpoints")
    assert would_resume(str(tmp_path), trainer)


@pytest.mark.parametrize(("paths", "other"), [(["a", "a", None], "process 2"), ([None, "a"], "process 1")])
def test_processes_that_found_different_checkpoints_are_refused(monkeypatch, paths, other):
    monkeypatch.setattr(run_checkpoints, "gathered", lambda _: paths)
    with pytest.raises(ValueError, match=f"`ckpt_path`.*{other}"):
        check_same_checkpoint(SimpleNamespace(ckpt_path=paths[0]))
    paths[:] = ["a"] * len(paths)
    check_same_checkpoint(SimpleNamespace(ckpt_path="a"))


def numbering(name, version, save_dir="runs"):
    return SimpleNamespace(name=name, version=version, save_dir=save_dir)


@pytest.mark.parametrize(
    ("loggers", "dirpaths", "owned"),
    [
        ([numbering("longce", "mine")], [None], ["runs/longce/mine", "runs/longce/mine/checkpoints"]),
        ([numbering("longce", 3)], ["a", "b", "a"], ["runs/longce/version_3", "a", "b"]),
        ([numbering("project", None)], [None], []),  # a server will name it
        ([numbering("project", None)], [None, "a"], ["a"]),
        ([numbering("longce", "mine", "s3://bucket")], [None, "a"], ["a"]),
        ([], [None], ["checkpoints"]),  # the working folder is the user's
        ([], [], []),
    ],
)
def test_which_folders_belong_to_a_run(tmp_path, monkeypatch, loggers, dirpaths, owned):
    monkeypatch.chdir(tmp_path)
    callbacks = [StepCheckpoint(dirpath) for dirpath in dirpaths]
    for callback, dirpath in zip(callbacks, dirpaths, strict=True):
        callback.dirpath = dirpath
    trainer = SimpleNamespace(loggers=loggers, checkpoint_callbacks=callbacks, default_root_dir=str(tmp_path))
    assert owned_folders(trainer) == [tmp_path / folder for folder in owned]


@pytest.mark.parametrize(("saved", "known"), [(7, ["step 7"]), (5, ["step 7", "step 5"]), (0, ["step 7"])])
def test_who_stopped_a_run_hears_what_is_saved(trainer, tmp_path, monkeypatch, caplog, saved, known):
    words = ["longce", "fit", "--ckpt_path", "last", "-c", "a b.yaml", "--ckpt_path=older"]
    monkeypatch.setattr(run_checkpoints.sys, "argv", words)
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 7
    trainer.checkpoint_callback._last_global_step_saved = saved
    with caplog.at_level("INFO"):
        run_checkpoints.log_resume_command(trainer)
    said = caplog.messages[-1]
    assert re.findall(r"step \d", said) == known
    command = f"longce fit -c 'a b.yaml' --ckpt_path {tmp_path / 'own'}"
    assert said.endswith(command) == (saved > 0)
