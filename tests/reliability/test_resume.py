"""Training that is killed at random moments and goes on, against training that nobody disturbs."""

import copy
import json
import os
import random
import re
import signal
import sys
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import yaml
from lightning import Callback

from longce.cli.main import main
from tests.support.experiments import component, experiment
from tests.support.forks import call

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "base.yaml")
STEPS = 16
WORKERS = {"undisturbed": 0, "killed": 0, "killed_with_workers": 2}
"""Processes that load the data in each run."""


class Recorder(Callback):
    """Appends a line for each batch, which no kill takes back: its number, its tokens, the loss to the last bit.

    With as many lines as the file ``limit`` names, it waits for the kill, so that no training ends before.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        tokens = f"{batch['input_ids'].shape} {zlib.crc32(batch['input_ids'].numpy().tobytes())}"
        line = json.dumps([number, tokens, outputs["loss"].item().hex()]) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())
        limit = Path(self.path).with_name("limit")
        while limit.exists() and batches_recorded(limit.parent) >= int(limit.read_text()):
            time.sleep(0.01)


def last_checkpoint(folder):
    """The newest one, as a user would name it."""
    found = [path for path in folder.glob("step*.ckpt") if zipfile.is_zipfile(path)]
    return max(found, key=lambda path: int(re.search(r"\d+", path.name)[0]), default=None)


def start(folder, config):
    """Train in a process of its own, from the last checkpoint."""
    if process := os.fork():
        return process
    log = os.open(folder / "log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    checkpoint = last_checkpoint(folder)
    try:
        main(["fit", "-c", BASE, "-c", config, *(["--ckpt_path", str(checkpoint)] if checkpoint else [])])
    finally:
        os._exit(sys.exc_info()[0] is not None)


def batches_recorded(folder):
    path = folder / "losses.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def train_and_kill(folder, kills):
    """Kill each training so many times, each a random while after a few more batches; then let it finish."""
    for name, count in kills.items():
        train_with_kills(folder / name, count, random.Random(name))


def train_with_kills(folder, kills, rng):
    config = str(folder / "experiment.yaml")
    for _ in range(kills):
        wanted = batches_recorded(folder) + rng.randint(1, 10)
        (folder / "limit").write_text(str(wanted + 2))
        process = start(folder, config)
        while batches_recorded(folder) < wanted and os.waitpid(process, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        (folder / "limit").unlink()
    _, status = os.waitpid(start(folder, config), 0)
    assert status == 0, (folder / "log.txt").read_text()[-3000:]


def write_config(folder, config, num_workers, every=1):
    """The config of a run that records each step in its own folder, and saves every so many."""
    folder.mkdir()
    config = copy.deepcopy(config)
    config["data"]["init_args"]["num_workers"] = num_workers
    save = {"dirpath": str(folder), "filename": "step{step}", "auto_insert_metric_name": False}
    config["trainer"]["default_root_dir"] = str(folder)
    config["trainer"]["callbacks"] = [
        component("tests.reliability.test_resume.Recorder", path=str(folder / "losses.jsonl")),
        component("callbacks.StepCheckpoint", every_n_train_steps=every, **save),
    ]
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))


def recorded(folder):
    """What the recorder wrote of each batch, by its number: more than once if it was trained on again after a kill."""
    by_number = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        number, *rest = json.loads(line)
        by_number.setdefault(number, []).append(rest)
    return by_number


@pytest.fixture
def config(tmp_path, corpus, model_dir):
    """A mixture of two corpora in rows that grow longer, gradients accumulated over two batches, for several epochs."""
    sources = {}
    for index, (name, weight) in enumerate((("books", 2.0), ("papers", 1.0))):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus[4 * index : 4 * index + 4]))
        init_args = {"train": str(path), "validation": str(path)}
        sources[name] = {"class_path": "datamodules.TextDataModule", "init_args": init_args, "weight": weight}
    data = component(
        "datamodules.MixtureDataModule",
        tokenizer=str(model_dir),
        sequence_length=256,
        sources=sources,
        curriculum={"sequence_length": 64, "share": 0.5},
    )
    trainer = {"max_steps": STEPS, "accumulate_grad_batches": 2, "limit_val_batches": 0, "logger": False}
    return experiment(model_dir, data, lr=0.003, **trainer)


def compare(config, folder, kills, workers=WORKERS, *, distinct=20, every=1):
    """Killed runs train on the batches of the undisturbed one, with its losses."""
    for name, num_workers in workers.items():
        write_config(folder / name, config, num_workers, every)
    call(train_and_kill, folder, {name: kills if name != "undisturbed" else 0 for name in workers})
    undisturbed = recorded(folder / "undisturbed")
    assert sorted(undisturbed) == list(range(len(undisturbed)))
    assert len({tokens for ((tokens, _),) in undisturbed.values()}) > distinct, "not one batch over and over"
    for name in list(workers)[1:]:
        killed = recorded(folder / name)
        assert killed.keys() == undisturbed.keys(), name
        for number, (expected,) in undisturbed.items():
            assert all(found == expected for found in killed[number]), (name, number, expected, killed[number])


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["restart", "skip"])
def test_losses_after_kills_equal_those_of_an_undisturbed_run(config, tmp_path, positions):
    if positions == "restart":
        compare(config, tmp_path, kills=1)
    else:
        config["data"]["init_args"] |= {"curriculum": None, "pose": {"target_length": 2000}}
        workers = {"undisturbed": 0, "killed_with_workers": 2}
        compare(config, tmp_path, kills=1, workers=workers, distinct=5)


@pytest.mark.long
@pytest.mark.slow
def test_losses_after_many_kills(config, tmp_path):
    config["trainer"]["max_steps"] = 100
    compare(config, tmp_path, kills=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "kills"),
    [(2, 2), pytest.param(0, 10, marks=pytest.mark.long), pytest.param(2, 10, marks=pytest.mark.long)],
)
def test_losses_of_a_stream_after_kills(config, corpus, tmp_path, num_workers, kills):
    for index, text in enumerate(corpus):
        (tmp_path / f"part{index}.jsonl").write_text(json.dumps({"text": text}))
    paths = {"train": f"{tmp_path}/part*.jsonl", "validation": str(tmp_path / "part0.jsonl")}
    settings = config["data"]["init_args"]
    del settings["sources"]
    config["data"] = {"class_path": "datamodules.StreamingTextDataModule", "init_args": {**settings, **paths}}
    config["trainer"]["max_steps"] = 6 * kills
    # The order of a stream depends on the number of workers.
    compare(config, tmp_path, kills=kills, workers={"undisturbed": num_workers, "killed": num_workers})
