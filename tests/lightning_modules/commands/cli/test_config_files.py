"""The class of the model in a config."""

import pytest
import yaml

from lightning_modules.commands.cli.config_files import names_model_class


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
