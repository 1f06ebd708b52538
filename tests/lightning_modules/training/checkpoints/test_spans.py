"""What a resume changes: found, announced, applied and recorded."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from callbacks import StepCheckpoint
from lightning_modules.training.checkpoints.io import newest_checkpoint
from lightning_modules.training.checkpoints.spans import (
    CONFIG_KEY,
    Span,
    find_changes,
    flatten_config,
    read_spans,
    resumed_spans,
    write_spans,
)
from longce.compare.command import compare
from tests.conftest import make_text
from tests.support.commands import longce

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*lr_scheduler.step")

CONFIG = {
    "seed_everything": 0,
    "ckpt_path": None,
    "trainer": {
        "accumulate_grad_batches": 1,
        "max_steps": 4,
        "logger": {"save_dir": "a"},
        "callbacks": None,
        "strategy": "auto",
    },
    "model": {
        "pretrained_model_name_or_path": "a",
        "context_length": 48,
        "stride": 16,
        "lora": None,
        "objective": {"class_path": "lightning_modules.objectives.LongCE", "init_args": {"gamma": 5.0}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003, "betas": [0.9, 0.95]}},
        "lr_scheduler": {"class_path": "x.Schedule", "init_args": {"arguments": {"warmup": 1}}},
        "model_config": {"rope_parameters": {"rope_type": "default"}},
    },
    "data": {
        "class_path": "datamodules.TextDataModule",
        "init_args": {"train": "t", "validation": "v", "validation_sets": {"a": {"files": "a"}}},
    },
}
CHANGES = {
    "model.optimizer.init_args.lr": 1e-4,
    "model.objective.class_path": "lightning_modules.objectives.CrossEntropy",
    "trainer.accumulate_grad_batches": 2,
    "model.pretrained_model_name_or_path": "b",
    "model.lora": {"r": 8},
    "seed_everything": 1,
    "model.model_config.rope_parameters.rope_theta": 9e4,
    "model.lr_scheduler.init_args.arguments.num_cycles": 2.5,
    "data.init_args.validation_sets.b": {"files": "b"},
    "trainer.strategy": {"class_path": "x.Strategy"},
    "model.new_option": 3,
}


def change(name, value):
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    *path, last = name.split(".")
    part = config
    for key in path:
        part = part[key]
    part[last] = value
    return config


@pytest.mark.parametrize(("name", "value"), CHANGES.items())
def test_each_changed_setting_is_found_with_both_values(name, value):
    found = find_changes(CONFIG, change(name, value))
    if isinstance(value, dict):
        ((member, value),) = value.items()
        name = f"{name}.{member}"
    assert [*found] == [name]
    assert str(found[name][1]) == str(value)
    (line,) = Span(7, "", found).describe()
    assert line.startswith(f"Resumed at step 7: `{name}` is ")
    kept = name in ("seed_everything", "model.pretrained_model_name_or_path")
    assert ("no effect" in line) == kept


def test_a_name_may_begin_with_another_one():
    """Keys of learning rates are regular expressions."""
    rates = {"layers.0": 1e-6, "layers": 1e-5}
    before = change("model.parameter_groups", {"learning_rates": rates})
    after = change("model.parameter_groups", {"learning_rates": {**rates, "layers": 2e-5}})
    assert find_changes(before, after) == {"model.parameter_groups.learning_rates.layers": (1e-5, 2e-5)}


def test_callbacks_are_matched_by_class_and_number():
    def config(*callbacks):
        named = [{"class_path": f"callbacks.{name}", "init_args": {"x": x}} for name, x in callbacks]
        return change("trainer.callbacks", named or None)

    before = config(("A", 1), ("B", 1), ("B", 2))
    assert find_changes(before, before) == {}
    assert find_changes(before, config(("A", 1), ("B", 3), ("B", 2))) == {"trainer.callbacks.B.init_args.x": (1, 3)}
    assert find_changes(before, config(("A", 1), ("B", 1))) == {
        "trainer.callbacks.B.2.class_path": ("callbacks.B", None),
        "trainer.callbacks.B.2.init_args.x": (2, None),
    }
    added = {"class_path": (None, "callbacks.A"), "init_args.x": (None, 1)}
    assert find_changes(config(), config(("A", 1))) == {f"trainer.callbacks.A.{key}": added[key] for key in added}
    (line,) = Span(7, "", find_changes(before, config(("A", 2), ("B", 1), ("B", 2)))).describe()
    assert "unless the callback restores it from the checkpoint" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [("ckpt_path", "last"), ("trainer.logger", {"save_dir": "b"}), ("trainer.enable_x", True)],
)
def test_where_a_run_starts_and_logs_is_no_change(name, value):
    assert find_changes(CONFIG, change(name, value)) == {}


def test_a_config_becomes_flat_without_what_only_places_a_run():
    config = yaml.safe_load(
        "{ckpt_path: x, trainer: {logger: {save_dir: y}, callbacks: [{name: z}], devices: [0, 1]}, seed: 1, no: null}"
    )
    assert flatten_config(config) == {"trainer.callbacks.0.name": "z", "trainer.devices": "[0, 1]", "seed": 1}
    named = {"class_path": "callbacks.ExternalEvaluator", "init_args": {"name": "a"}}
    assert list(flatten_config({"callbacks": [{"class_path": "b.C"}, named]})) == [
        "callbacks.C.class_path",
        "callbacks.ExternalEvaluator.a.class_path",
        "callbacks.ExternalEvaluator.a.init_args.name",
    ]


def test_spans_that_reached_no_checkpoint_are_dropped(tmp_path, monkeypatch):
    spans_module = "lightning_modules.training.checkpoints.spans"
    written = {4: (CONFIG, [Span(0, "config.yaml", {})])}  # config and spans of the training that wrote a checkpoint
    monkeypatch.setattr(f"{spans_module}.describe_checkpoint", lambda path: SimpleNamespace(step=int(path.name)))

    def load(path):
        config, spans = written[int(path.name)]
        return {CONFIG_KEY: {"config": yaml.safe_dump(config), "spans": json.dumps(spans)}}

    monkeypatch.setattr(f"{spans_module}.load_without_tensors", load)
    for step, gamma in ((4, 3.0), (8, 2.0), (8, 1.0), (6, 4.0)):
        config = change("model.objective.init_args.gamma", gamma)
        spans = resumed_spans(Path(str(step)), yaml.safe_dump(config))
        for later in (6, 8):
            written.setdefault(later, (config, spans))
        write_spans(tmp_path, spans, f"{step}-{gamma}.yaml")
    name = "model.objective.init_args.gamma"
    found = [(span.step, span.changed.get(name)) for span in read_spans(tmp_path)]
    assert found == [(0, None), (4, [5.0, 3.0]), (6, [3.0, 4.0])]
    assert isinstance(json.loads((tmp_path / "spans.json").read_text()), list), "plain JSON"
    (tmp_path / "spans.json").write_text("[")
    with pytest.raises(ValueError, match=r"spans\.json"):
        read_spans(tmp_path)


class Rates(Callback):
    """The optimizer's settings at each step."""

    seen = ()

    def on_train_batch_start(self, trainer, *_):
        (group,) = trainer.optimizers[0].param_groups
        self.seen = (*self.seen, (trainer.global_step, group["lr"], group["weight_decay"]))


@pytest.fixture
def fit(model_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.txt").write_text(make_text(600))
    data = {"tokenizer": str(model_dir), "train": "t.txt", "validation": "t.txt", "sequence_length": 64}
    config = yaml.safe_load(RUN)
    config["model"]["pretrained_model_name_or_path"] = str(model_dir)
    config["data"] = {"class_path": "datamodules.TextDataModule", "init_args": {**data, "cache_dir": "cache"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)

    def run(*options):
        rates = Rates()
        original = StepCheckpoint.setup

        def setup(self, trainer, *rest, **named):
            trainer.callbacks.append(rates)
            return original(self, trainer, *rest, **named)

        with monkeypatch.context() as patch:
            patch.setattr(StepCheckpoint, "setup", setup)
            longce("fit", "-c", "a.yaml", *options)
        return rates.seen

    return run


RUN = """
seed_everything: 0
model:
  context_length: 32
  stride: 16
  optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.01, weight_decay: 0.0}}
  lr_scheduler: {class_path: torch.optim.lr_scheduler.LinearLR, init_args: {start_factor: 0.5, total_iters: 4}}
trainer:
  accelerator: cpu
  max_steps: 2
  limit_val_batches: 0
  enable_progress_bar: false
  log_every_n_steps: 1
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: runs, version: a}
  callbacks: [{class_path: callbacks.StepCheckpoint, init_args: {save_last: true}}]
"""


def warmup(step):
    return 0.5 + 0.5 * min(1, step / 4)


RESUME = ("--ckpt_path", "last", "--trainer.max_steps", "4")


@pytest.mark.slow
def test_a_changed_learning_rate_takes_effect_and_is_recorded(fit, tmp_path, caplog):
    fit()
    seen = fit(*RESUME, "--model.optimizer.lr", "0.001", "--model.optimizer.weight_decay", "0.1")
    assert [step for step, _, _ in seen] == [2, 3]
    for step, rate, decay in seen:
        assert (rate, decay) == pytest.approx((0.001 * warmup(step), 0.1))
    assert "`model.optimizer.init_args.lr` is 0.001 instead of 0.01; it takes effect" in caplog.text
    folder = next((tmp_path / "runs").glob("*/a"))
    assert {name: values[1] for name, values in read_spans(folder)[1].changed.items()} == {
        "trainer.max_steps": 4,
        "model.optimizer.init_args.lr": 0.001,
        "model.optimizer.init_args.weight_decay": 0.1,
    }
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "spans.json").unlink()
    (tmp_path / "other" / "config-resumed-at-step-2.yaml").unlink()
    assert "0.01, from step 2 on 0.001" in compare([folder, tmp_path / "other"])
    longce("export", newest_checkpoint(folder), tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "From step 2 on, `model.optimizer.init_args.lr` was `0.001` instead of `0.01`." in card


@pytest.mark.slow
def test_an_unchanged_resume_announces_nothing_and_a_changed_schedule_takes_effect(fit, tmp_path, caplog):
    fit()
    weights = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)["state_dict"]
    caplog.clear()
    assert fit("--ckpt_path", "last") == ()
    assert "Resumed at step" not in caplog.text
    after = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], after[name]) for name in weights)
    seen = fit(*RESUME, "--model.lr_scheduler.total_iters", "2")
    assert [rate for _, rate, _ in seen] == pytest.approx([0.01, 0.01])


@pytest.mark.slow
def test_a_checkpoint_far_from_its_run_knows_its_config(fit, tmp_path, caplog):
    """Moved to a folder of its own, and resumed into the run of another name, twice."""
    fit()
    (tmp_path / "far").mkdir()
    newest_checkpoint(next((tmp_path / "runs").glob("*/a"))).rename(tmp_path / "far" / "a.ckpt")
    shutil.rmtree(tmp_path / "runs")
    other = ("--trainer.logger.init_args.version", "b")
    seen = fit("--ckpt_path", "far/a.ckpt", "--trainer.max_steps", "3", "--model.optimizer.lr", "0.001", *other)
    assert [rate for _, rate, _ in seen] == pytest.approx([0.001 * warmup(2)])
    assert "`model.optimizer.init_args.lr` is 0.001 instead of 0.01; it takes effect" in caplog.text
    fit(*RESUME, "--model.optimizer.lr", "0.002", *other)
    spans = read_spans(next((tmp_path / "runs").glob("*/b")))
    assert [(span.step, span.config) for span in spans] == [
        (0, ""),  # the config of the first run is not in this folder
        (2, "config.yaml"),
        (3, "config-resumed-at-step-3.yaml"),
    ]


WARM = "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "named"),
    [
        ([], ["optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1"], "`model.optimizer` is torch.optim.SGD"),
        ([], ["lr_scheduler", "torch.optim.lr_scheduler.ConstantLR"], "`model.lr_scheduler`"),
        (
            ["lr_scheduler", WARM, "--model.lr_scheduler.T_0", "3"],
            ["optimizer.lr", "0.001"],
            "CosineAnnealingWarmRestarts cannot",
        ),
    ],
)
def test_what_cannot_change_is_refused_before_anything_is_recorded(fit, tmp_path, capsys, first, then, named):
    options = [f"--model.{first[0]}", *first[1:]] if first else []
    fit(*options)
    with pytest.raises(SystemExit) as stopped:
        fit(*options, *RESUME, f"--model.{then[0]}", *then[1:])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
    assert first or not list(tmp_path.rglob("config-resumed*"))
    assert not list(tmp_path.rglob("spans.json")), "no step was trained with these settings"
