"""Documents of a corpus by their row, as scores count them."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from longce.cli.main import main
from longce.inspect import read_row
from tests.conftest import make_text


def test_rows_and_lines_are_read(tmp_path):
    lines = [json.dumps({"body": {"text": "first"}}), "", json.dumps({"body": {"text": " "}}), "{broken"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"t": ["x", "y", "z"]}), tmp_path / "a.parquet", row_group_size=2)
    assert read_row(str(tmp_path / "a.jsonl"), 0, "body.text") == ("a.jsonl-0", "first")
    assert read_row(str(tmp_path / "a.parquet"), 2, "t") == ("a.parquet-2", "z")
    for file, row, column, message in (
        ("a.jsonl", 1, "body.text", "has no row 1: rows and lines count from 0, and blank lines are not documents"),
        ("a.jsonl", 2, "body.text", "it is only white space"),
        ("a.jsonl", 3, "body.text", "malformed JSON"),
        ("a.parquet", 3, "t", "has no row 3"),
        ("a.parquet", 0, "u", r"no column 'u'. Its columns are \['t'\]"),
        ("b.parquet", 0, "t", "No file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_row(str(tmp_path / file), row, column)


def test_a_line_has_a_page(tmp_path, evaluator_dir, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": make_text(60)}) + "\n")
    words = ["--evaluator", str(evaluator_dir), "--context_length", "32", "--stride", "16", "--device", "cpu"]
    main(["inspect", "a.jsonl", "--row", "0", *words])
    assert "a.jsonl-0.html" in capsys.readouterr().out
    assert (tmp_path / "a.jsonl-0.html").stat().st_size > 10_000
