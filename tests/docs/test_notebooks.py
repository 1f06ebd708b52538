"""Each notebook runs from top to bottom, in a few steps (`QUICK`) or in full, and is stored with its outputs."""

import base64
import json
import re

import pytest

from tests.support.notebooks import FOLDER, key_tokens_of_models, run

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def numbers(pattern, output):
    """What the groups of the pattern hold, of each line that it fits."""
    return [tuple(map(float, found.groups())) for found in re.finditer(pattern, output, re.MULTILINE)]


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_ran_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        source = "".join(cell["source"])
        assert cell["outputs"] or not re.search(r"\bprint\(|plt\.show\(", source), source
        assert not [output for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_name_no_path_of_a_machine(path):
    stored = json.dumps([cell["outputs"] for cell in code_cells(path)])
    assert not re.search(r"/(home|root|tmp|Users|work|mnt)/|[A-Z]:\\\\", stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_are_stored_and_fit_a_phone(path):
    outputs = [output.get("data", {}) for cell in code_cells(path) for output in cell["outputs"]]
    pictures = [base64.b64decode(data["image/png"]) for data in outputs if "image/png" in data]
    assert pictures
    for picture in pictures:
        width = int.from_bytes(picture[16:20], "big")  # of the header of a PNG
        assert width <= 450, "scaled to a phone of 390 pixels, text would be too small"
        assert len(picture) < 100_000


@pytest.mark.slow
def test_key_tokens(tmp_path, model_dir):
    text = tmp_path / "mine.txt"
    text.write_text("The Yeas and Nays of both Houses. " * 120)
    output = run("key_tokens", tmp_path, MODEL=str(model_dir), TEXT=str(text), LONGCE_CACHE=str(tmp_path / "cache"))
    assert re.search(r"^\d+ key tokens of [\d,]+$", output, re.MULTILINE)
    assert list(key_tokens_of_models(output)) == ["whole context", "last 256 tokens", "last 128 tokens"]
    assert "constitution" not in (tmp_path / "key_tokens.html").read_text()


@pytest.mark.slow
def test_fine_tune_with_longce(tmp_path):
    output = run("fine_tune_with_longce", tmp_path, QUICK="1")
    assert [step for step, *_ in numbers(r"^step (\d+) +(\S+) +(\S+)$", output)] == [0, 1, 3, 0, 1, 3]
    first, *_, last = numbers(r"^step \d+ +([\d.]+) +([\d.]+)$", output)
    assert first[0] == first[1], "both begin with the base model"
    assert max(last) < min(first)
    assert len(re.findall(r"^(?:base|CE|LongCE) .* 1,020 ", output, re.MULTILINE)) == 3
    ((mean,),) = numbers(r"^mean +first ([\d.]+)", output)
    assert mean > 1


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
