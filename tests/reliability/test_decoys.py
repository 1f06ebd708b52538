"""Modules in the working directory run only if the user names them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from longce.cli.registry import COMMANDS
from tests.support import decoy_runs
from tests.support.harness_tasks import write_tasks

CONFIGS = Path(__file__).parents[2] / "configs"
BASE, DEBUG = ["-c", str(CONFIGS / "base.yaml")], ["-c", str(CONFIGS / "debug.yaml")]
DECOYS = re.findall(
    r"\w+",
    """
    Bio _jsonnet _winapi accelerator adlfs aim apex aqlm argcomplete backports boto3 botocore bottleneck brotli
    brotlicffi ck4inductor clearml comet_ml cuda cython deeplearning dvclive eetq elasticsearch envwrap
    essentia faiss flash_attn flash_attn_interface flint fx2trt_oss g2p_en gammatone gcsfs gmpy gmpy2 h2
    habana_frameworks hf_transfer hqq ipywidgets isal jax jsonschema kernels librosa lz4 lzmaffi mistral_common
    mlx monkeytype mpi4py msvcrt neural_compressor nibabel numexpr omegaconf oneccl_bindings_for_pytorch onnx
    onnx_tf onnxruntime op_builder opt_einsum pdfplumber pesq polars pretty_midi py7zr pydot pynvml pystoi pyzstd
    rarfile redis rnc2rng ruamel s3fs scienceplots scikits simplejson sksparse snappy sniffio socks socksio
    soundfile soxr sqlalchemy substrait swanlab teich tensorflow tensorrt toml torch2trt torch_fidelity torch_mlu
    torch_musa torch_npu torch_sdaa torch_supa torch_supa_ext torch_xla torch_xmlir torchao torchaudio torchcodec
    torchcomms torchdistx torchvision trackio transformer_engine tree trimesh trio triton tutel tvm uarray
    wcwidth winreg xarray xgboost
    """,
)
"""Packages that some command looks for, and that are not installed."""
DECOY = """
with open({path!r}, "a") as stream:  # the working directory is another one while a config is read
    stream.write(__name__ + "\\n")
raise ImportError("the package is missing, as it is")
"""
OBJECTIVE = """
import my_helpers
from lightning_modules.objectives import LongCE

class Mine(LongCE):
    def __call__(self, *arguments, **options):
        import my_lazy_helpers
        return super().__call__(*arguments, **options)
"""

DATA = """
from datamodules import TextDataModule
from my_helpers import note

class Collate:
    def __init__(self, collate):
        self.collate = collate

    def __call__(self, rows):
        note("collated by a worker")
        return self.collate(rows)

class Spawning(TextDataModule):
    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.collate_fn = Collate(loader.collate_fn)
        if self.trainer.is_global_zero:  # a spawned worker imports everything again, which one of them shows
            loader.multiprocessing_context = "spawn"
        return loader
"""
HELPERS = """
def note(words):
    with open("NOTES", "a") as stream:
        stream.write(words + "\\n")
"""


def commands(folder, model, evaluator):
    """A little work for each command, in an order in which one finds what an earlier one has written."""
    windows = ["--context_length", "32", "--stride", "16"]
    pair = ["--model", model, "--evaluator", evaluator, "--dtype", "float32", *windows]
    experiment = [*BASE, *DEBUG, "-c", "experiment.yaml"]
    corpus = ["--model", model, "--output", "scores", "--device", "cpu", "--dtype", "float32", *windows]
    quick = ["--trainer.max_steps", "1", "--data.train_documents", "16", "--trainer.enable_progress_bar", "false"]
    documents = ["--data.path", "reports.jsonl", "--data.tokenizer", model, "--documents", "1", "--dtype", "float32"]
    documents += ["--output", "table5", "--min_tokens", "64", "--max_tokens", "150", *windows]
    limit = ["--limit", "1"]
    last = str(folder / "runs" / "longce" / "run" / "checkpoints" / "epoch=0-step=1.ckpt")
    return [
        ["fit", *experiment],
        ["validate", *experiment, "--ckpt_path", last],
        ["test", *experiment],
        ["predict", *experiment, "--trainer.callbacks", "null"],
        ["corpus", "score", "0.txt", *corpus],
        ["corpus", "select", "scores", "--where", "tokens >= 1", "--output", "ids.txt"],
        ["export", last, "exported", "--tokenizer", model],
        ["data", "inspect", *experiment, "--count", "1"],
        ["influence", *experiment, "--evaluator", evaluator, "--output", "weights"],
        ["plan", *experiment, "--gpu", "H200"],
        ["score", "0.txt", *pair, "--output", "score.parquet"],
        ["compare", "runs/longce/run", "--output", "compared.html"],
        ["correlate", "score.parquet", "table.csv", "--output", "correlation"],
        ["inspect", "0.txt", *pair, "--output", "page.html"],
        ["evaluate", "--model", model, "--tasks", "passkey", "--lengths", "512", "--samples", "1", "--output", "tasks"],
        [
            "evaluate",
            "--model",
            model,
            "--include_path",
            str(folder),
            "--tasks",
            "letter",
            *limit,
            "--output",
            "harness",
        ],
        ["reproduce", "--list"],
        ["reproduce", "table5", "--models", f"a={model}", "--evaluators", f"b={evaluator}", *documents],
        ["quickstart", *quick, "--trainer.val_check_interval", "1"],
    ]


@pytest.fixture
def place(tmp_path, corpus, model_dir):
    """A working directory with decoys, and with what the commands read."""
    for name in DECOYS:
        (tmp_path / f"{name}.py").write_text(DECOY.format(path=str(tmp_path / "EXECUTED")))
    (tmp_path / "my_objective.py").write_text(OBJECTIVE)
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my_helpers.py").write_text(HELPERS)
    (tmp_path / "my_lazy_helpers.py").write_text("")
    (tmp_path / "0.txt").write_text(corpus[0])
    (tmp_path / "table.csv").write_text("model,longppl,LongBench\na,2,40\nb,3,30\nc,4,25\n")
    (tmp_path / "reports.jsonl").write_text(json.dumps({"id": "a", "report": corpus[0]}))
    write_tasks(tmp_path, questions=2)
    data = {
        "tokenizer": str(model_dir),
        "train": "0.txt",
        "validation": "0.txt",
        "test": "0.txt",
        "sequence_length": 128,
    }
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger"}
    logger["init_args"] = {"save_dir": "runs", "name": "longce", "version": "run"}
    experiment = {
        "model": {
            "pretrained_model_name_or_path": str(model_dir),
            "model_config": None,
            "objective": "my_objective.Mine",
        },
        "data": {"class_path": "datamodules.TextDataModule", "init_args": data},
        "trainer": {"max_steps": 1, "val_check_interval": 1, "logger": logger},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    return tmp_path


def environment(folder):
    unset = ("PYTHONPATH", "PYTHONSAFEPATH", "MASTER_ADDR", "MASTER_PORT")  # other tests of this process may set them
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "LONGCE_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}


def executed(folder):
    return (folder / "EXECUTED").read_text().split() if (folder / "EXECUTED").exists() else []


@pytest.mark.slow
def test_no_command_runs_a_decoy(place, model_dir, evaluator_dir):
    words = commands(place, str(model_dir), str(evaluator_dir))
    assert {first for first, *_ in words} == set(COMMANDS)
    (place / "commands.json").write_text(json.dumps(words))
    program = [sys.executable, decoy_runs.__file__, "commands.json", *os.environ.get("DECOY_OPTIONS", "").split()]
    status = subprocess.run(program, cwd=place, env=environment(place), check=False).returncode
    assert executed(place) == []
    assert status == 0
    # They would have been run if the working directory was on the path.
    subprocess.run([sys.executable, "-c", f"import {DECOYS[0]}"], cwd=place, env=environment(place), check=False)
    assert executed(place) == DECOYS[:1]


@pytest.mark.slow
def test_two_processes_with_workers_find_the_users_classes_and_no_decoy(place):
    command = [Path(sys.executable).parent / "longce", "fit", *BASE, *DEBUG, "-c", "experiment.yaml"]
    command += ["--data", "my_data.Spawning", "--data.num_workers", "1", "--trainer.strategy", "ddp"]
    command += ["--trainer.devices", "2"]
    assert subprocess.run(command, cwd=place, env=environment(place), check=False).returncode == 0
    assert executed(place) == []
    assert (place / "NOTES").read_text().splitlines()[:2] == 2 * ["collated by a worker"]
