"""RESULTS.md is what the stored results say, and a result says how it came about."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import results

STORED = results.list_results()


def test_the_report_is_written_from_the_stored_results():
    assert STORED
    assert results.REPORT.read_text() == results.render(STORED), "run `python benchmarks/results.py render`"


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_result_says_how_it_came_about(path):
    result = json.loads(path.read_text())
    assert result["title"]
    assert result["output"]
    assert len(result["commit"]) == 40
    assert {"cpu", "cores"} <= result["machine"].keys() or "card" in result["machine"]
    assert {"python", "torch", "transformers"} <= result["versions"].keys()
    program, *arguments = shlex.split(result["command"])
    assert program in ("python", "longce", "git")  # git shows the page that a number was copied from
    assert not any(argument.startswith("/") for argument in arguments), "a path of one machine"


def test_a_run_is_recorded_and_a_failed_one_is_not(tmp_path, monkeypatch):
    changes = ""
    git = {"status": lambda: changes, "rev-parse": lambda: "c" * 40}
    monkeypatch.setattr(results, "_git", lambda command, *_: git[command]())
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(results, "REPORT", tmp_path / "RESULTS.md")
    (tmp_path / "data").write_text("text")

    def record(code):
        options = ["record", "one", "--title", "One", "--data", str(tmp_path / "data"), "--remark", "Of interest."]
        monkeypatch.setattr(sys, "argv", ["results.py", *options, "--", sys.executable, "-c", code])
        results.main()

    with pytest.raises(SystemExit, match="exit code 3"):
        record("raise SystemExit(3)")
    assert not (tmp_path / "results").exists()
    record("print('| a |\\n|---|\\n| 1 |')")
    result = json.loads((tmp_path / "results" / "one.json").read_text())
    assert result["output"] == [{"head": ["a"], "rows": [["1"]]}]
    assert result["commit"] == "c" * 40
    assert len(result["data"]) == 64
    report = (tmp_path / "RESULTS.md").read_text()
    assert all(part in report for part in ("## One", "Of interest.", "| a |", "`cccccccccc`", result["data"][:16]))
    (tmp_path / "data").write_text("other text")
    record("print('x')")
    assert json.loads((tmp_path / "results" / "one.json").read_text())["data"] != result["data"]
    changes = " M file.py"
    with pytest.raises(SystemExit, match=r"(?s)Commit or stash.*file\.py"):
        record("print('x')")
    assert Path(tmp_path / "results" / "one.json").exists()
