import re
import sys

import pytest

from lightning_modules.commands.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:.* val documents have no key token")


def run(tmp_path, monkeypatch, capsys, *options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce"])
    main(["quickstart", *options])
    return capsys.readouterr().out


def rows(output):
    """The table at the end: step, LongPPL and perplexity."""
    table = re.findall(r"^ +(\d+) +([\d.]+|nan) +([\d.]+)$", output, flags=re.MULTILINE)
    return [(int(step), float(longppl), float(perplexity)) for step, longppl, perplexity in table]


@pytest.mark.limit(10)  # four runs
def test_every_run_of_it_works_and_is_shown_as_a_command(tmp_path, monkeypatch, capsys):
    options = ["--trainer.max_steps", "2", "--data.train_documents", "64", "--trainer.enable_progress_bar", "false"]
    options += ["--trainer.log_every_n_steps", "1", "--data.validation_documents", "8"]
    # Nobody evaluates by a model of two steps: what it finds does not matter here, that it is asked does.
    output = run(tmp_path, monkeypatch, capsys, *options, "--trainer.val_check_interval", "1")
    assert output.count("$ longce ") == 4
    assert [step for step, *_ in rows(output)] == [0, 1]
    assert "tensorboard --logdir" in output
    for name in ("base", "evaluator", "longce"):
        assert (tmp_path / "runs/quickstart/models" / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_longppl_falls(tmp_path, monkeypatch, capsys):
    table = rows(run(tmp_path, monkeypatch, capsys))
    first, last = table[0], table[-1]
    assert first[0] == 0
    assert last[0] == 149
    assert first[1] > 15
    assert last[1] < 6
    assert [longppl for _, longppl, _ in table] == sorted((longppl for _, longppl, _ in table), reverse=True)
