"""The first measurement that README prints."""

import re
from pathlib import Path

import pytest

from longce.cli.main import main

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long]


def test_the_command_prints_the_numbers_of_readme(real_model, capsys, tmp_path):
    text = (ROOT / "README.md").read_text()
    settings = re.search(r"--evaluator models/gemma-3-270m\.gguf \\\n(.*)\n", text)[1].split()
    expected = re.search(r"notebooks/constitution\.txt(( +[\d.,]+){7})\n", text)[1].split()
    models = ["--model", str(real_model("smollm2")), "--evaluator", str(real_model("gemma"))]
    main(["score", str(ROOT / "notebooks" / "constitution.txt"), *models, *settings, "--cache_dir", str(tmp_path)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "constitution.txt" in line]
    assert line.split()[1:] == expected
