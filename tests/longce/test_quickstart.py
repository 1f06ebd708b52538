import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from longce.cli.main import main
from longce.quickstart import _logged

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:.* val documents have no key token")


def run(tmp_path, monkeypatch, capfd, *options):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce"])
    main(["quickstart", *options])
    return capfd.readouterr()


def rows(output):
    """The table at the end: step, LongPPL and perplexity."""
    table = re.findall(r"^ +(\d+) +([\d.]+|nan) +([\d.]+)$", output, flags=re.MULTILINE)
    return [(int(step), float(longppl), float(perplexity)) for step, longppl, perplexity in table]


@pytest.mark.slow
def test_each_run_is_a_line_and_the_log_has_the_commands(tmp_path):
    options = ["--trainer.max_steps", "2", "--data.train_documents", "64", "--data.validation_documents", "8"]
    # Nobody evaluates by a model of two steps: what it finds does not matter here, that it is asked does.
    options += ["--trainer.log_every_n_steps", "1", "--trainer.val_check_interval", "1"]
    command = [sys.executable, "-m", "longce.cli.main", "quickstart", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    output, lines = process.stdout, process.stdout.splitlines()
    assert not process.stderr
    assert [line[:5] for line in lines[:4]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert all(re.search(r" \.\. .*\d+ s$", line) for line in lines[:4])
    assert [step for step, *_ in rows(output)] == [0, 1, 2]
    assert len(lines) == 4 + 5 + 6
    report, page, log = (tmp_path / lines[n].split()[-1] for n in (-4, -3, -1))
    assert "perplexity" in report.read_text()
    assert "recall-7-1" in page.read_text()
    assert len(re.findall(r"^\$ longce ", log.read_text(), re.MULTILINE)) == 4
    assert f"tensorboard --logdir {log.parent.relative_to(tmp_path)}" in lines[-2]
    for name in ("base", "evaluator", "longce"):
        assert (tmp_path / "runs/quickstart/models" / name / "model.safetensors").is_file()


def test_a_failure_names_the_log_and_shows_its_end(tmp_path, monkeypatch, capfd):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, monkeypatch, capfd, "--data.sequence_lenght", "3")
    assert stopped.value.code == 2
    output, errors = capfd.readouterr()
    (log,) = tmp_path.rglob("quickstart.log")
    assert re.search(r"\.\. failed after \d+ s\n$", output)
    assert str(log.relative_to(tmp_path)) in errors
    assert "Did you mean `sequence_length`?" in errors


def interrupt():
    """End as Lightning does after Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


def test_ctrl_c_is_no_failure(tmp_path, capfd):
    with pytest.raises(KeyboardInterrupt), _logged(["fit"], tmp_path / "quickstart.log", "Train"):
        interrupt()
    assert re.fullmatch(r"Train \.\. stopped after \d+ s\n", capfd.readouterr().out)


@pytest.mark.long
@pytest.mark.slow
def test_longppl_falls(tmp_path, monkeypatch, capfd):
    table = rows(run(tmp_path, monkeypatch, capfd).out)
    first, last = table[0], table[-1]
    assert first[0] == 0
    assert last[0] == 150
    assert first[1] > 15
    assert last[1] < 6
    assert [longppl for _, longppl, _ in table] == sorted((longppl for _, longppl, _ in table), reverse=True)
