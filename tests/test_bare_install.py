"""Installations with few packages: training on a GPU machine, and the base installation without any extra."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from benchmarks import on_gpu
from lightning_modules.utilities.extras import EXTRAS, name_missing_extra
from longce.plan.hardware import GPU, find_rates
from tests.support.bare_install import bare_environment, required_distributions
from tests.support.forks import call
from tests.support.pages import ROOT

IMPORTS = """
import pkgutil, sys, lightning_modules.models, lightning_modules.functional, lightning_modules.metrics
import lightning_modules.long_context_lm, lightning_modules.scoring.scored_model, lightning_modules.training.fsdp
import lightning_modules.training.sequence_parallel, lightning_modules.training.checkpoints.io
from callbacks import ExternalEvaluator, StepCheckpoint
import benchmarks.on_gpu
assert "lightning_modules.models.served.endpoint" not in sys.modules  # httpx2 comes with new huggingface_hubs only
for package in (lightning_modules.models, lightning_modules.functional):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
try:
    import callbacks.key_token_inspector
except ModuleNotFoundError as error:
    print("hidden:", error.name)
"""


@pytest.mark.slow
def test_training_imports_without_the_packages_of_commands_and_data(tmp_path):
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=bare_environment(tmp_path))
    assert done.stdout.startswith("hidden: "), done.stderr[-2000:]
    assert {"torch", "tokenizers", "accelerate"} <= required_distributions()


def run_benchmark():
    with pytest.raises(SystemExit) as ended:
        on_gpu.main()
    assert not ended.value.code


@pytest.mark.slow
def test_the_gpu_benchmark_runs_from_checks_to_profile(tmp_path, monkeypatch):
    """On a bare machine, with tiny sizes: an evaluator, a training that is killed, and the rows of the table.

    Compiled steps are omitted: on a CPU they take half the time, and `test_compile.py` has them.
    """
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--device", "cpu", "--output", str(results)]
    run = {"capture_output": True, "text": True, "timeout": 500, "cwd": ROOT, "env": bare_environment(tmp_path)}
    done = subprocess.run([*command, "--only", "^(?!8 layers, fp32|.*compiled)"], **run)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = json.loads(results.read_text())["rows"]
    checks = [name for name, row in rows.items() if row.get("passed")]
    assert sum(name.startswith("step: sdpa") for name in checks) == 6
    assert {"evaluator with another tokenizer", "killed and resumed"} <= set(checks)
    timed = {name for name, row in rows.items() if row.get("seconds")}
    assert {"8B, bf16: LongPPL", "16 layers of 7B, bf16: LongCE", "8 layers, bf16: the authors' step"} <= timed
    assert len(rows["profile of a LongCE step"]["largest"]) == 3
    # The next call adds what is missing, and `longce plan` reads the result.
    monkeypatch.setattr(sys, "argv", [*command[2:], "--only", "^(?!.*(compiled|Flash|flash|tests))"])
    call(run_benchmark)
    again = json.loads(results.read_text())
    assert any(name.startswith("8 layers, fp32") for name in again["rows"].keys() - rows.keys())
    assert {name: again["rows"][name] for name in timed} == {name: rows[name] for name in timed}
    rates = find_rates(GPU("CPU", 0.1, 1.0), str(results), autocast=True)
    assert rates.measured == ("gemm", "attention", "attention_backward", "slowdown")
    assert 0 < rates.slowdown.low < rates.slowdown.high


COMMANDS = """
import contextlib, io, json, sys
import callbacks, datamodules, lightning_modules.long_context_lm
from longce.cli.main import main

assert not {"peft", "bitsandbytes"} & set(sys.modules), "they are imported for adapters only"
results = []
for words in json.loads(sys.argv[1]):
    status = 0
    sys.argv = ["longce", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            main(words)
        except SystemExit as stopped:
            status = stopped.code
    results.append([status, printed.getvalue()])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def run_base(tmp_path_factory):
    """Run commands one after the other, in one process with the packages of the base installation only.

    Return the process, and the status and the errors of each command.
    """
    folder = tmp_path_factory.mktemp("base")
    roots = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    environment = bare_environment(tmp_path_factory.mktemp("site"), roots)

    def run(commands):
        program = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        return done, json.loads(done.stdout.splitlines()[-1])

    return run


def test_extras_of_the_readme_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    paragraph = (ROOT / "README.md").read_text().partition("names its extra: ")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", paragraph))
    assert {"corpora", "reports", "serve", "dev"} <= named <= extras.keys()
    assert set(EXTRAS.values()) <= extras.keys()


@pytest.mark.parametrize(
    ("message", "extra"),
    [
        ("No module named 'absent_package'", None),
        ("No module named 'pandas'", None),  # it is installed, so something else is wrong
        ("No module named 'pandas.local_loader'", None),
    ],
)
def test_only_a_missing_package_of_an_extra_is_named(message, extra):
    assert name_missing_extra(message) is extra


@pytest.mark.slow
def test_fit_and_score_need_no_extra(run_base):
    configs = ["-c", str(ROOT / "configs/base.yaml"), "-c", str(ROOT / "configs/quickstart/base.yaml")]
    model = "runs/quickstart/models/base"
    sizes = ["--max_tokens", "200", "--context_length", "32", "--stride", "16"]
    text = str(ROOT / "notebooks/constitution.txt")
    commands = [
        ["fit", *configs, "--trainer.max_steps", "2"],
        ["score", text, "--model", model, "--evaluator", model, *sizes],
        ["inspect", text, "--output", "page.html", "--evaluator", model, *sizes],
        ["corpus", "score", text, "--model", model, "--output", "scores", *sizes],
    ]
    _, results = run_base(commands)
    for words, (status, errors) in zip(commands, results, strict=True):
        assert status == 0, (words, errors)


@pytest.mark.slow
def test_a_missing_extra_is_named_in_one_line(run_base):
    extras = {
        "compare runs": "reports",
        "correlate a.json b.json c.json --output x": "reports",
        "evaluate --model x --output y --tasks niah_single_1": "reports",
        "quickstart": "reports",
        "corpus select scores": "corpora",
        f"fit -c {ROOT}/configs/quickstart/longce.yaml --trainer.callbacks callbacks.LongContextTasks": "reports",
    }
    done, results = run_base([words.split() for words in extras])
    assert done.stderr == ""
    for (words, extra), (status, errors) in zip(extras.items(), results, strict=True):
        assert status == 2, words
        assert errors.count("\n") == 1, errors
        assert f"'.[{extra}]'" in errors
