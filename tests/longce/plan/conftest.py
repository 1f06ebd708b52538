import pytest
from transformers import AutoConfig

from longce.plan import hardware

SHAPES = {
    "llama-2-7b": {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32},
    "llama-3.1-8b": {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
}


@pytest.fixture(scope="session")
def llamas():
    """Configs with the published sizes of Llama-2-7B and Llama-3.1-8B."""
    common = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "dtype": "bfloat16"}
    return {name: AutoConfig.for_model("llama", **common, **sizes) for name, sizes in SHAPES.items()}


@pytest.fixture(autouse=True)
def assumed_rates(monkeypatch, tmp_path):
    """As for a card that was not measured; returns the folder of measurements."""
    stored = hardware.RESULTS
    monkeypatch.setattr(hardware, "RESULTS", tmp_path / "no results")
    return stored
