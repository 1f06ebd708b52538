"""A real model: SmolLM2-135M from its GGUF file, as its users meet it."""

import pytest

from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from longce.evaluate import evaluate

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_numbers_are_split_into_digits_as_in_its_training(model):
    tokenizer = load_tokenizer(str(model))
    tokens = [tokenizer.decode(each) for each in tokenizer("Items\n\n2019  45")["input_ids"]]
    assert tokens == ["Items", "\n\n", "2", "0", "1", "9", "  ", "4", "5"]


def test_it_finds_a_passkey(model, tmp_path):
    printed = evaluate(
        str(model), str(tmp_path), tasks=["passkey"], lengths=[512], samples=4, mode="teacher_forced", device="cpu"
    )
    assert "passkey  100.0" in printed, printed
