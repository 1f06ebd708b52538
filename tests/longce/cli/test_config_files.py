"""The class of the model in a config."""

import pytest
import yaml

from longce.cli.config_files import (
    CONFIGS,
    find_packaged_configs,
    names_model_class,
    use_checked_yaml,
)
from longce.cli.errors import ConciseParser


@pytest.mark.parametrize(
    ("words", "config", "expected"),
    [
        (["--model", "mine.Model"], {}, True),
        (["--model.help", "mine.Model"], {}, True),
        (["--model", "{stride: 16}"], {}, False),
        (["--model.stride", "16"], {"model": {"stride": 16}}, False),
        ([], {"model": "mine.Model"}, True),
        ([], {"model": {"class_path": "mine.Model", "init_args": {"stride": 16}}}, True),
        ([], {"model": None, "trainer": {"max_steps": 3}}, False),
    ],
)
def test_the_class_of_the_model_is_found(words, config, expected, tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    assert names_model_class(["-c", str(tmp_path / "a.yaml"), *words]) is expected


def test_settings_beside_the_class_of_the_model_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {class_path: mine.Model, stride: 16}")
    with pytest.raises(ValueError, match=r"a.yaml': `model` names a class, so move \['stride'\] to its `init_args`"):
        names_model_class([f"--config={tmp_path / 'a.yaml'}"])


def test_configs_of_the_package_stand_in_for_missing_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = str(CONFIGS / "base.yaml")
    words = ["fit", "-c", "configs/base.yaml", "--config=configs/base.yaml", "--model", "configs/base.yaml"]
    assert find_packaged_configs(words) == ["fit", "-c", base, f"--config={base}", "--model", "configs/base.yaml"]
    assert find_packaged_configs(["-c", "configs/mine.yaml"]) == ["-c", "configs/mine.yaml"]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.yaml").touch()
    assert find_packaged_configs(words) == words


@pytest.mark.parametrize("value", ["-inf", "-.inf", "-Infinity", "-1e3", "-2", "-.5"])
def test_every_spelling_of_a_negative_number_is_a_value(value):
    use_checked_yaml()
    parser = ConciseParser(exit_on_error=False)
    parser.add_argument("--beta", type=float)
    parser.add_argument("-c", "--config", action="config")
    expected = float(value.replace("-.inf", "-inf"))
    assert parser.parse_args(["--beta", value]).beta == expected
    assert parser.parse_args([f"--beta={value}"]).beta == expected
    assert parser.parse_args(["--config", f"beta: {value.replace('1e3', '1.0e+3')}"]).beta == expected
