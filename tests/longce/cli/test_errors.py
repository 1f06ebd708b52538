"""A mistyped command, option or key: one line with its place and the nearest name."""

import re
import sys
from pathlib import Path

import pytest

import longce.cli.lightning_cli  # noqa: F401  takes seconds, which are not those of a test
from longce.cli.main import main

CONFIGS = Path(__file__).parents[3] / "configs"
FIT = ["fit", "-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / "debug.yaml")]


@pytest.fixture
def error(tmp_path, monkeypatch, capsys):
    def run(*words, config=None):
        if config is not None:
            (tmp_path / "my.yaml").write_text(config)
            words = [*words, "-c", str(tmp_path / "my.yaml")]
        monkeypatch.setattr("sys.argv", ["longce"])
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        printed = capsys.readouterr().err.replace(f"{tmp_path}/", "").replace("Seed set to 0\n", "")
        assert printed.count("\n") == 1
        return printed.removeprefix("longce: error: ").strip()

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["scor"], "unknown command `scor`. Did you mean `score`?"),
        ([*FIT, "--model.gamma", "3"], "unknown option `--model.gamma`. Did you mean `--model.objective.gamma`?"),
        (
            [*FIT, "--data.sequence_lenght", "3"],
            "`datamodules.RecallDataModule` has no `sequence_lenght`. Did you mean `sequence_length`?",
        ),
        (
            [*FIT, "--trainer.callbacks+", "callbacks.StepChekpoint"],
            "`callbacks` has no `StepChekpoint`. Did you mean `StepCheckpoint`?",
        ),
        ([*FIT, "--trainer.logger", "Tens"], "unknown class `Tens`. Write it with its module."),
        (
            [*FIT, "--model.objective", "LongC"],
            "unknown class `LongC`. Did you mean `lightning_modules.objectives.LongCE`?",
        ),
        ([*FIT, "--model.stride", "x"], "`model.stride`: Expected int. Got value: x"),
        (
            [*FIT, "--data", "TextDataModule", "--data.train", "b.txt", "a.txt", "b.txt", "--data.seed", "3"],
            "`--data.train` has one value, but 'a.txt' follows it. If the shell has expanded a pattern, quote the"
            " pattern: `--data.train 'folder/*.txt'`.",
        ),
        (
            ["score", "a.txt", "--model", "m", "--output", "o.parquet", "b.txt"],
            "Put 'b.txt' before the options: `--output` has one value.",
        ),
        (
            [*FIT, "--model.stride=3", "a.txt"],
            "`--model.stride` has one value, but 'a.txt' follows it. If the shell has expanded a pattern, quote the"
            " pattern: `--model.stride 'folder/*.txt'`.",
        ),
    ],
)
def test_the_command_line_names_the_nearest(words, expected, error):
    assert error(*words) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("model:\n  objectve: X\n", "line 2: unknown option `model.objectve`. Did you mean `model.objective`?"),
        (
            "model: {objective: {init_args: {gama: 3}}}",
            "line 1: `lightning_modules.objectives.LongCE` has no `gama`. Did you mean `gamma`?",
        ),
        (
            "trainer:\n  callbacks+:\n  - class_path: callbacks.StepCheckpoint\n    init_args:\n      save_topk: 3\n",
            "line 5: `callbacks.StepCheckpoint` has no `save_topk`. Did you mean `save_top_k`?",
        ),
        ("data:\n  class_path: datamodules.PG19\n", "line 2: `datamodules` has no `PG19`."),
    ],
)
def test_a_config_names_the_file_and_the_line(config, expected, error):
    assert error(*FIT, config=config).startswith(f"my.yaml, {expected}")


def test_an_option_of_a_similar_name_does_not_hide_the_config(error):
    expected = "my.yaml, line 1: unknown option `model.strid`. Did you mean `model.stride`?"
    assert error(*FIT, "--model.stride", "32", config="model: {strid: 3}") == expected


OBJECTIVE = """
import torch
from lightning_modules.objectives import Objective

class Mine(Objective):
    def token_weights(self, long, short, batch):
        return {}
"""


def test_an_objective_without_its_method_is_named(error, tmp_path, monkeypatch):
    source = OBJECTIVE.format("long").replace("token_weights", "token_weight").replace("Mine", "Typo")
    (tmp_path / "my_typo.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_typo", raising=False)
    named = "{class_path: Normalized, init_args: {objective: {class_path: my_typo.Typo}}}"
    expected = "my.yaml, line 2: `my_typo.Typo` must define `token_weights`."
    assert error(*FIT, config=f"model:\n  objective: {named}\n") == expected


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Train with an objective of the user whose weights are an expression."""

    def run(expression):
        (tmp_path / "mine.py").write_text(OBJECTIVE.format(expression))
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        monkeypatch.setattr("sys.argv", ["longce"])
        main([*FIT, "--model.objective", "mine.Mine", "--trainer.logger", "false", "--trainer.callbacks", "null"])

    return run


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("long.sum(1)", r"`token_weights` of Mine must return a tensor of the shape \[B, T\] = .*, got \[\d+\]"),
        pytest.param(
            "None",
            r"`token_weights` of Mine must return .* got NoneType",
            marks=pytest.mark.slow,
        ),
        ("long * float('nan')", r"objective Mine returned [\d,]+ NaN token weights at step 0"),
        pytest.param("1 / (long * 0).abs()", r"returned [\d,]+ infinite token weights", marks=pytest.mark.slow),
        pytest.param("-torch.ones_like(long)", r"returned [\d,]+ negative token weights", marks=pytest.mark.slow),
    ],
)
def test_an_objective_of_the_user_that_fails_is_named(fit, expression, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        fit(expression)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert re.search(expected, error)
    assert "learning rate" not in error
