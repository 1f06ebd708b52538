"""The shell scripts for clusters, with stubs of SLURM's commands and of torchrun."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser

import longce.cli.lightning_cli  # noqa: F401  takes seconds, which are not those of a test
from longce.cli.main import main
from tests.support import commands, forks

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "configs").glob("*.sh"))
RECORD = '#!/bin/sh\nfor word in "$@"; do echo "$word" >> words; done\n'
STUBS = {
    "scontrol": '#!/bin/sh\nif [ "$1" = show ]; then echo node1; else echo "$@" >> scontrol.log; fi\n',
    "torchrun": RECORD,
    "srun": '#!/bin/sh\nshift\n"$@"\n',  # without its own option
}
ENVIRONMENT = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_ARRAY_TASK_ID": "3",
    "NODES": "2",
}


def start(script, folder, stubs, *options, **environment):
    """Start a script in a folder, where the stubs are found before the real commands."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {**STUBS, **stubs}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            ["bash", str(script), *options],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **paths, **environment},
            stdout=log,
            stderr=log,
        )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_commands_of_a_template_are_accepted(script, tmp_path, monkeypatch, capsys):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert start(script, tmp_path, {}, "--model.stride", "512").wait(20) == 0
    words = (tmp_path / "words").read_text().splitlines()
    options = get_args_parser().parse_args(words)
    assert (options.training_script, options.no_python, options.nproc_per_node) == ("longce", True, "8")
    words = options.training_script_args
    assert options.rdzv_endpoint in {"node1:29500", "localhost:29500", ""}
    monkeypatch.setattr("sys.argv", ["longce"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--print_config"])
    assert stopped.value.code == 0, capsys.readouterr().err
    assert words[words.index("--ckpt_path") + 1] == "last"


SRUN = """#!/bin/sh
shift
for node in 1 2; do "$@" & echo $! >> launchers; done
wait
"""


def start_node(number, words, port, folder):
    """Start the process of a node."""
    variables = {"NODE_RANK": str(number), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    variables["LONGCE_CACHE"] = str(folder / "cache")
    with mock.patch.dict(os.environ, variables), contextlib.chdir(folder):
        return forks.start(commands.longce, *words, out=folder / "log.txt")


@pytest.mark.slow
def test_a_job_of_two_nodes_is_requeued_and_resumes(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = tmp_path / "slurm.sh"
    script.write_text((ROOT / "configs/slurm.sh").read_text().replace("29500", str(port)))
    stubs = {
        "srun": SRUN,
        "scontrol": STUBS["scontrol"].replace("node1", "localhost"),
        "longce": f'#!/bin/sh\nexec {sys.executable} -m longce.cli.main "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    options = ["-c", str(ROOT / "configs/base.yaml"), "-c", "configs/debug.yaml", "--trainer.num_nodes", "2"]
    options += ["--trainer.strategy", "ddp", "--trainer.limit_val_batches", "0", "--trainer.callbacks+"]
    options += ["{class_path: callbacks.StepCheckpoint, init_args: {save_on_exception: true, save_last: true}}"]
    options += ["--trainer.callbacks+", "{class_path: tests.support.fault_runs.Recorder, init_args: {folder: .}}"]
    job = {"SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "1", "RUN": "test", "LONGCE_CACHE": str(tmp_path / "cache")}

    running = start(script, tmp_path, stubs, *options, "--trainer.max_steps", "100000", **job)
    while len(list(tmp_path.glob("rank?.jsonl"))) < 2:  # each process has trained a batch
        assert running.poll() is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.1)
    for launcher in (tmp_path / "launchers").read_text().split():
        os.kill(int(launcher), signal.SIGUSR1)
    assert running.wait(120) == 0, (tmp_path / "log.txt").read_text()
    assert set((tmp_path / "scontrol.log").read_text().splitlines()) == {"requeue 77"}
    (saved,) = (tmp_path / "runs/longce/test/checkpoints").glob("*step*.ckpt")
    step = int(saved.stem.rpartition("=")[2])

    # Its next start has the same command, here without torchrun.
    options += ["--trainer.max_steps", str(step + 2)]
    recorded = {"scontrol": stubs["scontrol"]}
    assert start(script, tmp_path, recorded, *options, **job).wait(60) == 0
    words = (tmp_path / "words").read_text().splitlines()
    words = words[words.index("longce") + 1 :]
    nodes = [start_node(number, words, port, tmp_path) for number in (0, 1)]
    for process in nodes:
        process.join()
    assert [process.exitcode for process in nodes] == [0, 0], (tmp_path / "log.txt").read_text()
    assert f"`max_steps={step + 2}` reached" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / f"runs/longce/test/config-resumed-at-step-{step}.yaml").is_file()
