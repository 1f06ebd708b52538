from types import SimpleNamespace

import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lightning_modules.saved_config import SavedConfig


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Where a run with this folder of logs saves its config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("number: 7 # mine")
    parser = LightningArgumentParser()
    parser.add_argument("--number", type=int)
    strategy = SimpleNamespace(broadcast=lambda value: value)

    def saved(folder):
        trainer = SimpleNamespace(log_dir=folder, is_global_zero=True, strategy=strategy)
        callback = SavedConfig(parser, parser.parse_args(["--number=8"]), overwrite=True)
        callback.setup(trainer, None, "predict")
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml"))

    return saved


@pytest.mark.parametrize("folder", [".", "", "logs/..", None])
def test_a_config_in_the_working_folder_is_left_alone(saved, tmp_path, folder):
    assert saved(folder) == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "number: 7 # mine"


def test_it_is_saved_beside_the_logs(saved, tmp_path):
    assert saved(str(tmp_path / "logs")) == ["config.yaml", "logs/config.yaml"]
    assert saved("logs") == ["config.yaml", "logs/config.yaml"]  # again
    assert "number: 8" in (tmp_path / "logs" / "config.yaml").read_text()
