"""Each notebook runs from top to bottom, on models as small as they get, and is stored without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datamodules.recall import recall_tokenizer
from tests.conftest import tiny_model

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture
def quickstart_folder(tmp_path):
    for seed, name in enumerate(("base", "evaluator", "longce")):
        folder = tmp_path / "runs" / "quickstart" / "models" / name
        tiny_model("llama", 1024, seed=seed).save_pretrained(folder)
        recall_tokenizer().save_pretrained(folder)
    return tmp_path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, quickstart_folder):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    script = quickstart_folder / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells))
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, str(script)]
    result = subprocess.run(
        command, cwd=quickstart_folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "key tokens of" in result.stdout
