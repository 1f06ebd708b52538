"""Class paths from before modules moved, and the class of the model."""

import warnings

import pytest
import yaml

from lightning_modules.commands.cli.config_files import _MOVED, names_model_class, rename_old_paths, use_checked_yaml
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


@pytest.mark.parametrize(
    ("words", "config", "expected"),
    [
        (["--model", "mine.Model"], {}, True),
        (["--model=mine.Model"], {}, True),
        (["--model.help", "mine.Model"], {}, True),
        (["--model", "{stride: 16}"], {}, False),
        (["--model.stride", "16"], {"model": {"stride": 16}}, False),
        ([], {"model": "mine.Model"}, True),
        ([], {"model": {"class_path": "mine.Model", "init_args": {"stride": 16}}}, True),
        ([], {"fit": {"model": {"class_path": "mine.Model"}}}, True),
        ([], {"model": None, "trainer": {"max_steps": 3}}, False),
        ([], {"model": 3}, False),
        ([], ["model"], False),
    ],
)
def test_the_class_of_the_model_is_found(words, config, expected, tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    assert names_model_class(["-c", str(tmp_path / "a.yaml"), *words]) is expected


def test_settings_beside_the_class_of_the_model_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {class_path: mine.Model, stride: 16}")
    with pytest.raises(ValueError, match=r"a.yaml': `model` names a class, so move \['stride'\] to its `init_args`"):
        names_model_class([f"--config={tmp_path / 'a.yaml'}"])
