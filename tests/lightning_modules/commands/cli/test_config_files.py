"""Class paths from before modules moved."""

import warnings

import pytest
import yaml

from lightning_modules.commands.cli.config_files import _MOVED, rename_old_paths, use_checked_yaml
from lightning_modules.utilities.user_modules import import_object

CLASSES = {
    "datamodules.pg19": "PG19DataModule",
    "datamodules.pile_arxiv": "PileArxivDataModule",
    "datamodules.gov_report": "GovReportDataModule",
    "lightning_modules.context_extension": "ContextExtension",
    "lightning_modules.context_ladder": "ContextLadder",
    "lightning_modules.sequence_parallelism": "UlyssesStrategy",
    "lightning_modules.sharding": "FullyShardedStrategy",
}


@pytest.mark.parametrize("module", _MOVED)
def test_an_old_class_path_names_the_same_class_and_warns(module):
    with pytest.warns(FutureWarning, match=f"`{module}` is now `{_MOVED[module]}`"):
        renamed = rename_old_paths(f"{module}.{CLASSES[module]}")
    assert import_object(renamed).__name__ == CLASSES[module]


def test_new_paths_and_other_text_stay():
    text = "\n".join(f"{module}.Name my.{old}.Name {old}" for old, module in _MOVED.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rename_old_paths(text) == text


def test_configs_are_renamed_as_they_are_read(tmp_path):
    import jsonargparse

    use_checked_yaml()
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("-c", "--config", action="config")
    parser.add_argument("--strategy", type=dict)
    config = {"strategy": {"class_path": "lightning_modules.sharding.FullyShardedStrategy"}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(config))
    with pytest.warns(FutureWarning, match="is now") as warned:
        options = parser.parse_args(["-c", str(tmp_path / "old.yaml")])
    assert options.strategy["class_path"] == "lightning_modules.training.fsdp.FullyShardedStrategy"
    assert len(warned) == 1
