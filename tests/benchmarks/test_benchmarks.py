"""The benchmarks run: at sizes that say nothing about speed."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import transformers

from tests.conftest import make_text

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name, *options):
        is_package = (FOLDER / name).is_dir()
        file = FOLDER / name / "__main__.py" if is_package else FOLDER / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        spec.loader.exec_module(module)
        if name == "against_authors":
            monkeypatch.setitem(module.SHAPES, "S", {**module.SHAPES["S"], "hidden_size": 64, "num_hidden_layers": 1})
        module.main()
        return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]

    # Benchmarks quiet the loggers of their process; here other tests have that process.
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    levels = {name: logging.getLogger(name).level for name in names}
    verbosity = transformers.logging.get_verbosity()
    yield run
    logging.disable(logging.NOTSET)
    transformers.logging.set_verbosity(verbosity)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_against_the_authors(run):
    sizes = ("--lengths", 96, 160, "--vocabularies", 200, "--context_length", 32, "--stride", 16, "--rounds", 1)
    table = run("against_authors", *sizes, "--floor")
    rows = [line for line in table if line[0].startswith("S V=200") and len(line) > 1]
    assert len(rows) == 2 * 6
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("other", [False, True])
def test_against_the_authors_with_a_real_model(run, model_dir, evaluator_dir, tmp_path, other):
    (tmp_path / "text.txt").write_text(make_text(80))
    files = ("--model", model_dir, "--text", tmp_path / "text.txt", *(("--evaluator", evaluator_dir) if other else ()))
    sizes = ("--lengths", 100, "--context_length", 32, "--stride", 16, "--rounds", 1, "--alpha", 0.05, "--beta", -20)
    table = run("against_authors", *files, *sizes, "--sides", "baseline", "ours", "--floor")
    scored, alone, step = (line for line in table if line[0].startswith("model0 V=") and len(line) > 1)
    for row in (scored, alone):
        agreement, keys = row[-1].rsplit(", key tokens ", 1)
        assert float(agreement.rpartition(" ")[2]) < 1e-5
        theirs, ours = map(int, keys.split(" / "))
        assert theirs == ours > 3
    assert float(step[-1].rpartition(" ")[2]) < 1e-5
    assert sum("floor" in line[0] and "measured" in line[0] for line in table) == 3
    with pytest.raises(SystemExit, match="fewer than 5000"):
        run("against_authors", *files, "--lengths", 5000)


def test_corpus_against_the_authors_loop(run):
    sizes = ("--lengths", 20, 80, "--vocabulary", 200, "--width", 32, "--layers", 1, "--batch_tokens", 256)
    windows = ("--context_length", 16, "--stride", 8)
    table = run("corpus", "--documents", 4, "--rounds", 1, *sizes, *windows)
    rows = [line for line in table if line[0].startswith(("authors", "longce corpus score"))]
    assert len(rows) == 3
    assert all(float(row[2]) > 0 and float(row[3]) < 1e-5 for row in rows)


@pytest.mark.slow
def test_data_pipeline(run, model_dir, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(make_text(300, seed=number))
    sizes = ("--sequence_length", 64, "--processes", 1, "--rounds", 1, "--workers", 0, "--read_seconds", 0.05)
    files = ("--texts", tmp_path, "--tokenizer", model_dir)
    table = {line[0]: line for line in run("data_pipeline", *files, *sizes, "--synthetic_gb", 0.0002)}
    assert float(table["datasets / ours"][1]) > 0
    assert float(table["0 workers"][2]) == pytest.approx(4 * float(table["0 workers"][3]), abs=3)
    assert float(table["0.0002 GB"][1]) > 50
