"""Help and usage errors come before torch is imported, and settings of a class are options of all that take it."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import jsonargparse
import pytest

from callbacks import ExternalEvaluator, HuggingFaceExport, LongContextTasks
from lightning_modules.export.options import ExportOptions
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.tasks.evaluation.config import TaskConfig
from longce.cli.registry import COMMANDS

PROGRAM = """
import contextlib, io, json, sys
from longce.cli.main import main
heavy, commands = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
for words in commands:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            sys.argv[1:] = words
            main(words)
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, out.getvalue(), err.getvalue(), sorted(heavy & set(sys.modules))]))
"""
"""Runs commands one after another in one process, and prints status, output and heavy imports after each."""

HEAVY = ("torch", "lightning", "transformers", "datasets", "peft", "bitsandbytes")
EXPERIMENTS = ("fit", "validate", "test", "predict")


def run(*commands, folder, heavy=HEAVY):
    """Return status, output, error output and heavy imports of each command."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = json.dumps([command.split() for command in commands])
    program = [sys.executable, "-c", PROGRAM, json.dumps(heavy), words]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(commands, results, strict=True))


def test_help_and_version_import_no_torch(tmp_path):
    names = ["", *(name for name in COMMANDS if name not in EXPERIMENTS)]
    results = run(*(f"{name} --help" for name in names), "--version", folder=tmp_path)
    assert results.pop("--version") == [0, f"longce {version('longce')}\n", "", []]
    for command, (status, out, _, imported) in results.items():
        assert (status, imported) == (0, []), command
        assert out.startswith("usage: longce"), command


USAGE_ERRORS = [
    ("", "usage: longce"),
    ("fiit", "unknown command `fiit`"),
    ("score --model a --evaluator b missing.txt", "No file 'missing.txt'"),
    ("score --model a --evaluator b texts/", "No file 'texts/': pass UTF-8 text files, one document each."),
    ("evaluate --model ./missing --output o", "No model at './missing'"),
    ("evaluate --model a --output o --gen_kwargs x", "`gen_kwargs` has the unknown name 'x'"),
    ("corpus select missing", "'missing' contains no scores"),
    ("evaluate --model a", "output"),
    ("fit -c twice.yaml", "given twice"),
    ("fit --model.revison a", "unknown option `--model.revison`. Did you mean `--model.revision`?"),
]


def test_usage_errors_import_no_torch(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "twice.yaml").write_text("seed_everything: 1\nseed_everything: 2\n")
    results = run(*(words for words, _ in USAGE_ERRORS), folder=tmp_path)
    for words, message in USAGE_ERRORS:
        status, out, err, imported = results[words]
        assert (status, imported) == (2, []), words
        assert message in out + err, words


WRONG_SETTINGS = [
    ("score a.txt --model a --evaluator b --alpha -1", "`alpha` must be finite and 0 or more"),
    ("score a.txt --model a --model ./c --evaluator b", "No model at './c'"),
    ("score a.txt --model a --evaluator http://u:p@h", "without user, password"),
    ("inspect a.txt --evaluator b --alternatives 21", "`alternatives` must be an integer from 0 to 20"),
    ("inspect a.txt --evaluator ./b", "No model at './b'"),
]


@pytest.mark.slow
def test_wrong_settings_are_refused_before_the_libraries_of_models_are_imported(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    results = run(*(words for words, _ in WRONG_SETTINGS), folder=tmp_path, heavy=HEAVY[1:])
    for words, message in WRONG_SETTINGS:
        status, _, err, imported = results[words]
        assert (status, imported) == (2, []), words
        assert message in err, words


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
