"""Training that is killed at random moments and goes on, against training that nobody disturbs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import fault_runs
from tests.support.fault_runs import ROOT, Run, new_run

WORKERS = {"undisturbed": 0, "killed": 0, "killed_with_workers": 2}
"""Processes that load the data in each run."""


def train_and_kill(run, kills):
    """Kill the training so many times, each a random while after a few more batches; then let it finish."""
    rng = random.Random(run.folder.name)
    for _ in range(kills):
        wanted = len(run.records()) + rng.randint(1, 10)
        run.start()
        run.until(lambda wanted=wanted: len(run.records()) >= wanted)
        time.sleep(rng.uniform(0, 0.03))
        if run.alive():
            os.kill(run.processes[0], signal.SIGKILL)
        run.wait()
    run.start()
    statuses, _ = run.wait()
    if any(statuses):
        sys.exit(run.log()[-3000:])


@pytest.fixture
def config(tmp_path, corpus, model_dir):
    """A mixture of two corpora in rows that grow longer, gradients accumulated over two batches, for several epochs."""
    sources = {}
    for index, (name, weight) in enumerate((("books", 2.0), ("papers", 1.0))):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus[4 * index : 4 * index + 4]))
        init_args = {"train": str(path), "validation": str(path)}
        sources[name] = {"class_path": "datamodules.TextDataModule", "init_args": init_args, "weight": weight}
    data = {"tokenizer": str(model_dir), "sequence_length": 256, "sources": sources}
    save = {"dirpath": "checkpoints", "filename": "step-{step}", "every_n_train_steps": 1}
    return {
        "model": {
            "pretrained_model_name_or_path": str(model_dir),
            "context_length": 32,
            "stride": 16,
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}},
        },
        "data": {
            "class_path": "datamodules.MixtureDataModule",
            "init_args": {**data, "curriculum": {"sequence_length": 64, "share": 0.5}},
        },
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "max_steps": 16,
            "accumulate_grad_batches": 2,
            "limit_val_batches": 0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {"class_path": "tests.support.fault_runs.Recorder", "init_args": {"folder": "."}},
                {"class_path": "callbacks.StepCheckpoint", "init_args": {**save, "auto_insert_metric_name": False}},
            ],
        },
    }


def compare(config, folder, kills, workers=WORKERS):
    """Killed runs train on the batches of the undisturbed one, with its losses."""
    undisturbed, *killed = (new_run(folder / name, config, workers=number) for name, number in workers.items())
    command = [sys.executable, "-m", "tests.reliability.test_resume", str(folder), str(kills)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    records = undisturbed.records()
    assert [number for number, *_ in records] == list(range(len(records)))
    assert len({tokens for _, tokens, _ in records}) > 20, "not one batch over and over"
    for run in killed:
        assert not run.differences(undisturbed)


@pytest.mark.slow
def test_losses_after_kills_equal_those_of_an_undisturbed_run(config, tmp_path):
    compare(config, tmp_path, kills=2)


@pytest.mark.long
@pytest.mark.slow
def test_losses_after_many_kills(config, tmp_path):
    config["trainer"]["max_steps"] = 100
    compare(config, tmp_path, kills=12)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_losses_of_a_stream_after_many_kills(config, corpus, tmp_path, num_workers):
    for index, text in enumerate(corpus):
        (tmp_path / f"part{index}.jsonl").write_text(json.dumps({"text": text}))
    paths = {"train": f"{tmp_path}/part*.jsonl", "validation": str(tmp_path / "part0.jsonl")}
    settings = config["data"]["init_args"]
    del settings["sources"]
    config["data"] = {"class_path": "datamodules.StreamingTextDataModule", "init_args": {**settings, **paths}}
    config["trainer"]["max_steps"] = 60
    # The order of a stream depends on the number of workers.
    compare(config, tmp_path, kills=10, workers={"undisturbed": num_workers, "killed": num_workers})


if __name__ == "__main__":
    fault_runs.HANGS = 500.0  # the machine may be busy, and the longest run takes a minute
    for name in filter(lambda name: (Path(sys.argv[1]) / name).exists(), WORKERS):
        train_and_kill(Run(Path(sys.argv[1]) / name), 0 if name == "undisturbed" else int(sys.argv[2]))
