"""The early check of an experiment's names and numbers: what it finds, what it leaves to the parser."""

import subprocess
import sys
from pathlib import Path

import pytest

from longce.cli.config_files import use_checked_yaml
from longce.cli.early_keys import _list_arguments, check_keys
from longce.cli.errors import _list_parameters

CONFIGS = Path(__file__).parents[3] / "configs"


def write(folder, text):
    (folder / "my.yaml").write_text(text)
    return ["fit", "-c", str(folder / "my.yaml")]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("trianer: {max_steps: 3}", "unknown option `trianer`. Did you mean `trainer`?"),
        ("model: {contextlength: 3}", "unknown option `model.contextlength`. Did you mean `model.context_length`?"),
        ("trainer: {max_steps: many}", "`trainer.max_steps`: Expected int. Got value: many"),
        ("trainer: {max_steps: '@3'}", "`trainer.max_steps`: Expected int. Got value: @3"),
        (
            "data: {class_path: datamodules.PG19DataModule, init_args: {sequencelength: 3}}",
            "`datamodules.PG19DataModule` has no `sequencelength`. Did you mean `sequence_length`?",
        ),
        (
            "data: {class_path: datamodules.RecallDataModule, init_args: {batch_size: 4x}}",
            "`data.init_args.batch_size`: Expected int. Got value: 4x",
        ),
        (
            "model: {objective: {class_path: LongCE, init_args: {gama: 3}}}",
            "`lightning_modules.objectives.LongCE` has no `gama`. Did you mean `gamma`?",
        ),
        (
            "trainer: {callbacks+: [{class_path: callbacks.StepChekpoint}]}",
            "`callbacks` has no `StepChekpoint`. Did you mean `StepCheckpoint`?",
        ),
        (
            "trainer: {callbacks: [{class_path: callbacks.StepCheckpoint, init_args: {save_topk: 3}}]}",
            "`callbacks.StepCheckpoint` has no `save_topk`. Did you mean `save_top_k`?",
        ),
    ],
)
def test_misspellings(config, expected, tmp_path, capsys):
    use_checked_yaml()
    with pytest.raises(SystemExit):
        check_keys(write(tmp_path, config))
    assert capsys.readouterr().err == f"longce: error: {tmp_path}/my.yaml, line 1: {expected}\n"


def test_they_are_found_without_torch_and_lightning(tmp_path):
    words = write(tmp_path, "data: {class_path: datamodules.RecallDataModule, init_args: {sequence_lenght: 3}}")
    program = f"""
import sys
from longce.cli.main import main
try:
    main({words})
except SystemExit as stopped:
    assert stopped.code == 2
assert not {{"torch", "lightning", "transformers"}} & set(sys.modules), "imported"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Did you mean `sequence_length`?" in result.stderr, result.stderr
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("config", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_the_configs_of_the_package_pass(config):
    use_checked_yaml()
    check_keys(["fit", "-c", str(config)])


USER = """
from datamodules import RecallDataModule
from datamodules import RecallDataModule as DataModule
from my_missing_package import Unknown
class OwnArguments(RecallDataModule):
    def __init__(self, *, kept: int = 1, **others):
        super().__init__(32)
        self.others = others
class Own(Own):
    pass
class Other(Unknown):
    pass
class Taken(RecallDataModule):
    def __init__(self, **others):
        self.batch_sizes = others.pop("batch_sizes", None)
        super().__init__(**others)
class Overloaded(RecallDataModule):
    @overload
    def __init__(self, batch_size: int): ...
    def __init__(self, batch_size: int, batch_sizes: int | None = None):
        super().__init__(32)
class Positional(RecallDataModule):
    def __init__(self, batch_sizes: int, /, batch_size: int = 1):
        super().__init__(32)
class Recall(RecallDataModule):
    pass
Recall1 = Recall
def recall() -> RecallDataModule:
    return RecallDataModule(32)
"""


@pytest.mark.parametrize(
    "setting",
    [
        "OwnArguments, init_args: {sequence_lenght: 3}",  # what a class does with its keywords, only it knows
        "Own, init_args: {sequence_lenght: 3}",
        "Other, init_args: {sequence_lenght: 3}",
        "SomethingElse",
        "Taken, init_args: {batch_sizes: 3}",
        "Overloaded, init_args: {batch_sizes: 3}",
        "Positional, init_args: {batch_sizes: 3}",
        "Recall1, init_args: {on: 3}",
        "recall",
        "DataModule",
    ],
)
def test_classes_that_it_does_not_understand_are_left_to_the_parser(setting, tmp_path, monkeypatch):
    use_checked_yaml()
    (tmp_path / "my_early_module.py").write_text(USER)
    (tmp_path / "my_broken_module.py").write_text("class :")
    monkeypatch.syspath_prepend(tmp_path)
    check_keys(write(tmp_path, "data: {class_path: datamodules.RecallDataModule, init_args: {on: 3}}"))
    for module in ("my_early_module", "my_broken_module", "my_missing_module", "__main__"):
        check_keys(write(tmp_path, f"data: {{class_path: {module}.{setting}}}"))


@pytest.mark.parametrize(
    "class_path",
    [
        "datamodules.MixtureDataModule",
        "datamodules.StreamingTextDataModule",
        "callbacks.StepCheckpoint",
        "lightning.pytorch.callbacks.LearningRateMonitor",
        "lightning.pytorch.Trainer",
        "lightning_modules.objectives.LongCE",
        "lightning_modules.training.fsdp.FullyShardedStrategy",
    ],
)
def test_no_name_that_the_parser_knows_is_missing(class_path):
    written = _list_arguments(class_path)
    assert written is not None
    assert {*written} >= {*_list_parameters(class_path)}
