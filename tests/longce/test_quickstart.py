"""The quickstart, which `tests/test_packaging.py` also runs as a command of its own."""

import re
import sys

import pytest

from longce.cli.main import main
from longce.quickstart import _logged

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
