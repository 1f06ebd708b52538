import pytest

from benchmarks.real_models.systems import LoadedSystem
from lightning_modules.models.tokenization.tokenizer import load_tokenizer


@pytest.fixture
def tiny_systems(monkeypatch, model_dir):
    """Let every system of a study load the same tiny model."""

    def load(self, system, models, *, dtype="float32", device="cpu"):
        self.system, self.file, self.dtype, self.device, self._backbone = system, str(model_dir), dtype, device, None
        self.tokenizer = load_tokenizer(str(model_dir))

    monkeypatch.setattr(LoadedSystem, "__init__", load)
