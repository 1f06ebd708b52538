"""The benchmarks run: at sizes that say nothing about speed."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import make_text

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name, *options):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        spec.loader.exec_module(module)
        if name == "against_authors":
            monkeypatch.setitem(module.SHAPES, "S", {**module.SHAPES["S"], "hidden_size": 64, "num_hidden_layers": 1})
        module.main()
        return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_against_the_authors(run):
    sizes = ("--lengths", 96, 160, "--vocabularies", 200, "--context_length", 32, "--stride", 16, "--rounds", 1)
    table = run("against_authors", *sizes, "--floor")
    rows = [line for line in table if line[0].startswith("S V=200") and len(line) > 1]
    assert len(rows) == 2 * (6 + hasattr(torch.nn.functional, "linear_cross_entropy"))
    for row in rows:
        if row[1].startswith("score"):
            agreement, keys = row[-1].rsplit(", key tokens ", 1)
            assert float(agreement.rpartition(" ")[2]) < 1e-5
            theirs, ours = map(int, keys.split(" / "))
            assert theirs == ours > 3
        elif ": our " not in row[1]:
            assert float(row[-1].rpartition(" ")[2]) < 1e-5
    assert any("memory ~ n^" in line[0] for line in table)
    assert sum("floor" in line[0] and "measured" in line[0] for line in table) == 2 * 4


def test_rehearsal_of_the_gpu_table(run):
    sizes = ("--layers", 1, "--vocabulary", 200, "--lengths", 64, "--context_length", 16, "--stride", 8)
    table = run("on_gpu", *sizes, "--device", "cpu", "--attention", "sdpa")
    names = [line[2] for line in table if line[0] == "sdpa"]
    assert names == [
        "perplexity: one pass",
        "LongPPL, evaluator = model",
        "CE step, full",
        "LongCE step, full",
        "CE step, selective",
        "LongCE step, selective",
    ]


def test_cheaper_weights_of_a_model(run, model_dir, evaluator_dir, tmp_path):
    (tmp_path / "text.txt").write_text(make_text(80))
    thresholds = ("--alpha", 0.3, "--beta", -6.0, "--context_length", 32, "--stride", 8, "--draws", 3)
    files = ("--model", model_dir, "--evaluator", evaluator_dir, "--files", tmp_path / "text.txt")
    table = {line[0]: line for line in run("cheaper_weights", *files, *thresholds)}
    assert float(table["short_dtype: bfloat16"][1]) > 0.99
    assert float(table["stride = context_length = 32"][1]) > 0.5
    assert float(table["cross entropy"][1]) < float(table["short_dtype: bfloat16"][1])
    assert any("weights stored by evaluator" in name for name in table)


def test_extended_contexts(run):
    options = ("--seeds", 1, "--base_steps", 2, "--steps", 2, "--questions", 3, "--methods", "none", "eabf")
    rows = [line for line in run("extended_contexts", *options) if line[0] in ("none", "eabf")]
    assert [row[0] for row in rows] == ["none", "eabf"] * 2
    for row in rows:
        shares = [float(cell.split()[0]) for cell in row[1:]]
        assert len(shares) == 4
        assert all(0 <= share <= 1 for share in shares)


def test_data_pipeline(run, model_dir, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(make_text(300, seed=number))
    sizes = ("--sequence_length", 64, "--processes", 1, "--rounds", 1, "--workers", 0, "--read_seconds", 0.05)
    files = ("--texts", tmp_path, "--tokenizer", model_dir)
    table = {line[0]: line for line in run("data_pipeline", *files, *sizes, "--synthetic_gb", 0.0002)}
    assert float(table["datasets / ours"][1]) > 0
    assert float(table["0 workers"][2]) == pytest.approx(4 * float(table["0 workers"][3]), abs=3)
    assert float(table["0.0002 GB"][1]) > 50
