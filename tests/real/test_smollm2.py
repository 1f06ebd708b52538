"""A real model: SmolLM2-135M from its GGUF file, on the text of this project's license."""

import os
from pathlib import Path

import pytest
import torch
from longppl.longppl import compute_longppl
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_models.fetch import fetch
from lightning_modules.commands.evaluate import evaluate
from lightning_modules.models.loading.gguf import convert_gguf
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.score import score

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2 as a folder; it is fetched into the folder of `LONGCE_REAL_MODELS` if it is not there."""
    folder = os.environ.get("LONGCE_REAL_MODELS")
    if not folder:
        pytest.skip("LONGCE_REAL_MODELS names no folder for real models")
    try:
        (file,) = fetch(Path(folder), ["smollm2-135m"])
    except ValueError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGCE_CACHE", str(tmp_path_factory.mktemp("real")))
        return convert_gguf(file)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "license.txt"
    path.write_text((Path(__file__).parents[2] / "LICENSE").read_text()[:3500])
    return path


def test_numbers_are_those_of_the_authors_package(model, text):
    sizes = {"alpha": 1.0, "beta": -4.0}
    found = score(str(text), str(model), str(model), context_length=128, stride=64, dtype="float32", **sizes)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = compute_longppl(text.read_text(), network, network, tokenizer, tokenizer, None, 128, 64, **sizes)
    assert found["key_tokens"] == expected["n_key_token"] > 10
    assert found["longppl"] == pytest.approx(float(expected["longppl"]), rel=1e-4)
    assert found["perplexity"] == pytest.approx(float(expected["ppl"]), rel=1e-4)
    assert found["longppl_per_evaluator_token"] == pytest.approx(found["longppl"], rel=1e-4)
    assert found["bits_per_byte"] < 1.5  # of a license, which it has seen


def test_numbers_are_split_into_digits_as_in_its_training(model):
    tokenizer = load_tokenizer(str(model))
    tokens = [tokenizer.decode(each) for each in tokenizer("Items\n\n2019  45")["input_ids"]]
    assert tokens == ["Items", "\n\n", "2", "0", "1", "9", "  ", "4", "5"]


def test_it_finds_a_passkey(model, tmp_path):
    printed = evaluate(
        str(model), str(tmp_path), tasks=["passkey"], lengths=[512], samples=4, mode="teacher_forced", device="cpu"
    )
    assert "passkey  100.0" in printed, printed
