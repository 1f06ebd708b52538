"""Evaluations as a user runs them: beside a run, at the step of its checkpoint, and never among its files."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_modules.training import evaluation
from tests.support.commands import longce

RUN = Path("runs/longce/mine")
OWN = """
trainer:
  enable_progress_bar: false
  enable_model_summary: false
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: runs, name: longce, version: mine, default_hp_metric: false}
  callbacks:
    - class_path: callbacks.StepCheckpoint
      init_args:
        filename: step-{step}
        auto_insert_metric_name: false
        every_n_train_steps: 1
        monitor: step
        mode: max
        save_top_k: 2
        save_last: link
"""
CONFIGS = Path(__file__).parents[3] / "configs"
FILES = [CONFIGS / "base.yaml", CONFIGS / "experiments/longce_pg19.yaml", CONFIGS / "debug.yaml", "own.yaml"]
FIT = ["fit", *(word for file in FILES for word in ("-c", str(file))), "--trainer.max_steps", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a run of two steps has trained."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own.yaml").write_text(OWN)
    longce(*FIT, folder=folder)
    return folder


@pytest.fixture
def folder(trained, tmp_path, monkeypatch):
    """A copy of it, to do anything with; it is the working folder."""
    shutil.copytree(trained, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def hashes(run):
    files = [path for path in run.rglob("*") if path.is_file() and evaluation.EVALUATIONS_FOLDER not in path.parts]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def events(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [event.step for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_evaluations_leave_a_run_alone_and_log_at_the_checkpoints_step(folder):
    before = hashes(RUN)
    assert len(before) > 5
    own = ["-c", RUN / "config.yaml", "--ckpt_path", RUN]
    scores = {"class_path": "callbacks.TokenScoresWriter", "init_args": {"output_dir": "scores"}}
    longce("validate", *own, "--model.stride", "8")
    longce("validate", *own)
    longce("validate", *FIT[1:-2], "--trainer.logger.init_args.version", "null")  # without a checkpoint
    longce("test", *own[:-1], RUN / "checkpoints" / "step-1.ckpt")
    longce("predict", *own, "--trainer.callbacks", f"[{scores}]")
    assert hashes(RUN) == before
    found = {path.name: path for path in (RUN / evaluation.EVALUATIONS_FOLDER).iterdir()}
    assert set(found) == {"validate-step-2", "validate-step-2-2", "test-step-1", "predict-step-2"}
    assert yaml.safe_load((found["validate-step-2"] / "config.yaml").read_text())["model"]["stride"] == 8
    assert yaml.safe_load((found["validate-step-2-2"] / "config.yaml").read_text())["model"]["stride"] == 16
    assert events(found["validate-step-2"])["val/perplexity"] == [2]
    assert events(found["test-step-1"])["test/perplexity"] == [1]
    beside = RUN.parent / evaluation.EVALUATIONS_FOLDER
    assert events(beside / "validate")["val/perplexity"] == [0]
    assert sorted(RUN.parent.iterdir()) == [beside, RUN]


def test_a_run_that_is_read_only_is_evaluated_beside_the_logger(folder, monkeypatch):
    """As with the checkpoint of a colleague."""

    def read_only(path, **_):
        raise ValueError(path)

    monkeypatch.setattr(evaluation, "writable_folder", read_only)
    shutil.move("runs", "theirs")
    longce("validate", *FIT[1:-2], "--ckpt_path", "theirs/longce/mine")
    assert not Path("theirs/longce/mine", evaluation.EVALUATIONS_FOLDER).exists()
    assert events(RUN / evaluation.EVALUATIONS_FOLDER / "validate-step-2")["val/perplexity"] == [2]


@pytest.mark.slow
def test_an_evaluation_without_logs_leaves_the_working_folder_alone(folder):
    """Its config may be the one that the run was started with."""
    Path("config.yaml").write_text(Path("own.yaml").read_text())
    before = set(folder.iterdir())
    longce("validate", *FIT[1:-2], "--trainer.logger", "false")
    assert set(folder.iterdir()) == before
    assert Path("config.yaml").read_text() == Path("own.yaml").read_text()


STOP = """
from lightning.pytorch import Callback

class Stop(Callback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.steps:
            raise ValueError("stopped")
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1])
def test_the_config_and_hparams_of_a_run_are_those_that_trained(tmp_path, monkeypatch, steps):
    monkeypatch.chdir(tmp_path)
    fit = [word for word in FIT if word != "own.yaml"]
    del fit[fit.index(str(CONFIGS / "debug.yaml")) + 1]  # its -c
    Path("stop_early.py").write_text(STOP)
    callback = json.dumps([{"class_path": "stop_early.Stop", "init_args": {"steps": steps}}])
    version = ["--trainer.logger.init_args.version", "a"] if steps else []
    with pytest.raises(SystemExit):
        longce(*fit, *version, "--trainer.callbacks", callback, "--model.optimizer.lr", "0.5")
    longce(*fit, *version)
    run = Path("runs/longce", "a" if steps else "version_1")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    shown = yaml.safe_load((run / "hparams.yaml").read_text())
    assert saved["model"]["optimizer"]["init_args"]["lr"] == shown["model.optimizer.init_args.lr"] != 0.5
    assert not list(run.glob("config-*"))
    assert len(list(run.glob("events.*"))) == 1


@pytest.mark.slow
def test_a_resumed_run_keeps_its_config_and_takes_the_largest_step(folder):
    first, identity = (RUN / "config.yaml").read_bytes(), (RUN / "run.json").read_bytes()
    os.utime(RUN / "checkpoints" / "step-1.ckpt", (time.time() + 1e6,) * 2)
    longce(*FIT[:-1], "3", "--ckpt_path", "last")
    longce(*FIT[:-1], "3", "--ckpt_path", RUN)
    longce(*FIT[:-1], "4", "--ckpt_path", RUN)
    assert (RUN / "config.yaml").read_bytes() == first
    assert (RUN / "run.json").read_bytes() == identity
    added = sorted(path.name for path in RUN.glob("config-*"))
    assert added == [f"config-resumed-at-step-{step}.yaml" for step in ("2", "3-2", "3")]
    kept = {path.name: torch.load(path, weights_only=True) for path in (RUN / "checkpoints").glob("step-*")}
    assert set(kept) == {"step-3.ckpt", "step-4.ckpt"}
    assert {one["run_id"] for one in kept.values()} == {yaml.safe_load(identity)["id"]}
