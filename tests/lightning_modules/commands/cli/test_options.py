"""Help and usage errors come before torch is imported, and settings of a class are options of all that take it."""

import os
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import jsonargparse
import pytest

from callbacks import ExternalEvaluator, HuggingFaceExport, LongContextTasks
from lightning_modules.commands.cli.registry import COMMANDS
from lightning_modules.export.options import ExportOptions
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.tasks.evaluation.config import TaskConfig

LIGHT = """
import sys
from lightning_modules.commands.cli.main import main
try:
    main(sys.argv[1:])
finally:
    found = {"torch", "lightning", "transformers", "datasets", "peft", "bitsandbytes"} & set(sys.modules)
    assert not found, found
"""
EXPERIMENTS = ("fit", "validate", "test", "predict")


def run(*words, folder, program=LIGHT):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", ["", *(name for name in COMMANDS if name not in EXPERIMENTS), "reproduce miniature"]
)
def test_help_imports_no_torch(command, tmp_path):
    result = run(*command.split(), "--help", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: longce")


def test_version(tmp_path):
    result = run("--version", folder=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"longce {version('longce')}\n")


@pytest.mark.parametrize("command", [*COMMANDS, "data inspect", "reproduce miniature"])
def test_an_unknown_option_is_refused_without_torch(command, tmp_path):
    result = run(*command.split(), "--nonsense", "3", folder=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "error" in result.stderr
    assert "AssertionError" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "usage: longce"),
        ("fiit", "unknown command `fiit`"),
        ("score --model a --evaluator b missing.txt", "No file 'missing.txt'"),
        ("score --model a --evaluator b --stride x missing.txt", "stride"),
        ("score --model a --evaluator b texts/", "'texts/' is a folder: pass its text files, such as texts/*.txt."),
        ("inspect --evaluator b missing.txt", "No file 'missing.txt'"),
        ("evaluate --model ./missing --output o", "No model at './missing'"),
        ("evaluate --model a --output o --mode x", "mode"),
        ("evaluate --model a --output o --gen_kwargs x", "`gen_kwargs` must be such as"),
        ("compare missing", "No results at 'missing'"),
        ("compare name=missing", "No results at 'name=missing'"),
        ("correlate missing.csv --output o", "No results at 'missing.csv'"),
        ("select missing", "'missing' contains no scores"),
        ("evaluate --model a", "output"),
        ("fit -c missing.yaml", "The config 'missing.yaml' does not exist."),
        ("fit --modle.stride 3", "Did you mean `--model`?"),
        ("plan --gpuss 3", "Did you mean `--gpus`?"),
        ("fit -c twice.yaml", "given twice"),
    ],
)
def test_usage_errors_import_no_torch(words, message, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "twice.yaml").write_text("seed_everything: 1\nseed_everything: 2\n")
    result = run(*words.split(), folder=tmp_path)
    assert result.returncode == 2, result.stderr
    assert message in result.stdout + result.stderr
    assert "AssertionError" not in result.stderr


WITHOUT_TRANSFORMERS = LIGHT.replace('"torch", ', "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("score a.txt --model a --evaluator b --alpha -1", "`alpha` must be finite and 0 or more"),
        ("score a.txt --model a --evaluator b --stride 0", "`stride` (d) must be an integer of 1 or more"),
        ("score a.txt --model a --evaluator ./b", "No model at './b'"),
        ("score a.txt --model a --model ./c --evaluator b", "No model at './c'"),
        ("score a.txt --model a --evaluator http://u:p@h", "without user, password"),
        ("inspect a.txt --evaluator b --alternatives 21", "`alternatives` must be an integer from 0 to 20"),
        ("inspect a.txt --evaluator ./b", "No model at './b'"),
    ],
)
def test_wrong_settings_are_refused_before_the_libraries_of_models_are_imported(words, message, tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    result = run(*words.split(), folder=tmp_path, program=WITHOUT_TRANSFORMERS)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "AssertionError" not in result.stderr


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LongContextLM, ModelConfig),
        (ExternalEvaluator, EvaluatorConfig),
        (LongContextTasks, TaskConfig),
        (HuggingFaceExport, ExportOptions),
    ],
)
def test_settings_of_a_shared_class_are_keys_of_each_class_that_takes_them(kind, config):
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(kind, "found")
    assert {field.name for field in fields(config)} <= parser.get_defaults()["found"].as_dict().keys()
