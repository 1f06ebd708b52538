"""Each notebook runs from top to bottom, in a few steps (`QUICK`) or in full, and is stored without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What Jupyter does with the cells, without it: the last expression of each is shown, as HTML if it can be.
RUNNER = """
import ast, json, sys
from pathlib import Path

names = {}
for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text())["cells"]):
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        shown = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if shown is not None:
            value = eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), names)
            if hasattr(value, "_repr_html_"):
                Path("shown.html").write_text(value._repr_html_())
"""


def run(name, folder, **variables):
    """Run a notebook as a process of its own, as its readers do, and return what it printed."""
    (folder / "constitution.txt").write_text(
        (FOLDER / "constitution.txt").read_text(encoding="utf-8"), encoding="utf-8"
    )
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", RUNNER, str(FOLDER / f"{name}.ipynb")]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def numbers(pattern, output):
    """What the groups of the pattern hold, of each line that it fits."""
    return [tuple(map(float, found.groups())) for found in re.finditer(pattern, output, re.MULTILINE)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_without_outputs(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
def test_key_tokens(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("The Yeas and Nays of both Houses. " * 120)
    output = run("key_tokens", tmp_path, QUICK="1", TEXT=str(text))
    assert re.search(r"^\d+ key tokens of [\d,]+$", output, re.MULTILINE)
    assert len(numbers(r"^K = (\d+) +(\d+) key tokens", output)) == 3
    assert len(numbers(r"^corpus of 1 .* ([\d.]+|nan) +([\d.]+)$", output)) == 3
    page = (tmp_path / "shown.html").read_text()
    assert page.startswith("<iframe")
    assert "document.txt" in page


@pytest.mark.slow
def test_fine_tune_with_longce(tmp_path):
    output = run("fine_tune_with_longce", tmp_path, QUICK="1")
    assert [step for step, *_ in numbers(r"^step (\d+) +(\S+) +(\S+)$", output)] == [0, 1, 3, 0, 1, 3]
    first, *_, last = numbers(r"^step \d+ +([\d.]+) +([\d.]+)$", output)
    assert first[0] == first[1], "both begin with the base model"
    assert max(last) < min(first)
    assert len(re.findall(r"^(?:base|CE|LongCE) .* 1,022 ", output, re.MULTILINE)) == 3
    ((mean,),) = numbers(r"^mean +first ([\d.]+)", output)
    assert mean > 1


@pytest.mark.slow
@pytest.mark.long
def test_key_tokens_in_full(tmp_path, record_property):
    output = run("key_tokens", tmp_path)
    kinds = dict(re.findall(r"^(none|within the short context|128\+ tokens back) .* (\d+)$", output, re.MULTILINE))
    far, others = int(kinds.pop("128+ tokens back")), sum(map(int, kinds.values()))
    assert kinds["none"] == "0"
    assert far > 60
    assert far > 3 * others
    counts = [count for _, count in numbers(r"^K = (\d+) +(\d+) key tokens", output)]
    assert counts[-1] < counts[0]
    models = numbers(r"^corpus of 1 +[\d,]+ +\d+ +([\d.]+) +([\d.]+) ", output)
    (early, early_all), _, (last, last_all) = models
    record_property("LongPPL", [early, last])
    record_property("perplexity", [early_all, last_all])
    assert early / last > 20
    assert early_all / last_all < 5


@pytest.mark.slow
@pytest.mark.long
def test_fine_tune_with_longce_in_full(tmp_path, record_property):
    output = run("fine_tune_with_longce", tmp_path)
    steps = numbers(r"^step (\d+) +([\d.]+) +([\d.]+)$", output)
    longppl, perplexity = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    record_property("LongPPL of CE and LongCE, first and last", [longppl[0][1:], longppl[-1][1:]])
    assert longppl[-1][2] < longppl[0][2] / 3
    assert perplexity[-1][2] > perplexity[1][2] / 1.5, "hardly moves once the model is used to longer rows"
    models = dict(re.findall(r"^(base|CE|LongCE) +([\d.]+)", output, re.MULTILINE))
    assert float(models["LongCE"]) < float(models["base"])
