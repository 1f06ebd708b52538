"""What is read of an experiment's config, parsed as `longce plan` parses it."""

import json
import sys

import pytest
import torch
import yaml

from lightning_modules.models.short_context import ShortContextConfig
from longce.cli.experiment_options import add_plan_options
from longce.cli.lightning_cli import LongceCLI
from longce.plan.settings import read_experiment
from tests.conftest import tiny_config


@pytest.fixture
def read(tmp_path, model_dir, monkeypatch):
    """Reads a small experiment with further options."""
    config = {
        "model": {"pretrained_model_name_or_path": str(model_dir), "context_length": 32, "stride": 16},
        "data": {
            "class_path": "datamodules.RecallDataModule",
            "init_args": {"sequence_length": 256, "batch_size": 2},
        },
        "trainer": {
            "devices": 4,
            "num_nodes": 2,
            "accumulate_grad_batches": 3,
            "max_steps": 7,
            "precision": "bf16-mixed",
        },
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["longce", "-c", str(tmp_path / "experiment.yaml"), *options])
        cli = LongceCLI(add_plan_options, run=False)
        return read_experiment(cli.make("model"), cli.config)

    return run


def test_everything_is_found(read, model_dir):
    experiment = read()
    training = experiment.training
    assert (experiment.name, experiment.config.model_type) == (str(model_dir), "llama")
    assert (experiment.objective, experiment.max_steps, experiment.accumulated) == ("LongCE", 7, 3)
    assert (training.tokens, training.rows, training.gpus) == (256, 2, 8)
    assert (training.short_context, training.short_pass) == (ShortContextConfig(32, 16), True)
    assert (training.dtype, training.autocast) == (torch.float32, torch.bfloat16)
    assert (training.checkpointing, training.moments, training.step_copy) == ("none", 2, True)
    assert training.gradient_copy
    assert (experiment.curriculum, experiment.notes) == (None, ())


@pytest.mark.parametrize(("batches", "accumulates"), [("1", False), ("2", True)])
def test_gradients_last_only_if_batches_are_accumulated(read, batches, accumulates):
    assert read("--trainer.accumulate_grad_batches", batches).training.accumulates is accumulates


@pytest.mark.parametrize(("devices", "gpus", "notes"), [("auto", 1, 1), ("[0, 2, 3]", 6, 0)])
def test_a_number_of_devices_that_is_not_known(read, devices, gpus, notes):
    experiment = read("--trainer.devices", devices)
    assert experiment.training.gpus == gpus
    assert len(experiment.notes) == notes


def test_what_the_plan_leaves_out_is_said(read):
    notes = read("--model.attn_implementation", "eager", "--model.shifted_sparse_attention", "64").notes
    assert [note.split(" attention")[0] for note in notes] == ["eager", "shifted sparse"]


@pytest.mark.parametrize(("inner", "count"), [("LongCE", 1), ("CrossEntropy", 0)])
def test_a_schedule_inside_another_objective_is_noted(read, inner, count):
    schedule = {"class_path": "Scheduled", "init_args": {"objective": {"class_path": inner}, "start": 2}}
    objective = {"class_path": "Normalized", "init_args": {"objective": schedule}}
    notes = read("--model.objective", json.dumps(objective)).notes
    assert sum("the schedule has steps without one" in note for note in notes) == count


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("32-true", "float32", ["float32 is planned"]),
        ("32-true", "bfloat16", []),
        ("bf16-true", "float32", []),
        ("bf16-mixed", "float32", ["float32 experts"]),
    ],
)
def test_the_rates_are_those_of_half_precision(read, tmp_path, precision, dtype, expected):
    tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=8).save_pretrained(tmp_path)
    path = str(tmp_path / "config.json")
    options = {"model.pretrained_model_name_or_path": path, "model.dtype": dtype, "trainer.precision": precision}
    notes = read(*(f"--{name}={value}" for name, value in options.items())).notes
    assert [note.partition(",")[0].partition(" at")[0] for note in notes] == expected


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("32-true", "bfloat16", (torch.bfloat16, None)),
        ("bf16-true", "float32", (torch.bfloat16, None)),
        ("bf16-mixed", "auto", (torch.float32, torch.bfloat16)),
    ],
)
def test_precisions(read, precision, dtype, expected):
    training = read("--trainer.precision", precision, "--model.dtype", dtype).training
    assert (training.dtype, training.autocast) == expected


def test_strategies(read):
    ddp = read("--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy").training
    assert (ddp.sharded, ddp.gradient_copy) == (False, True)
    views = ["--trainer.strategy.gradient_as_bucket_view", "true"]
    assert not read("--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy", *views).training.gradient_copy
    fsdp = read("--trainer.strategy", "lightning_modules.training.fsdp.FullyShardedStrategy").training
    assert (fsdp.sharded, fsdp.gradient_copy, fsdp.offload, fsdp.offload_activations) == (True, False, False, False)
    assert fsdp.gpus == 8
    offload = ["--trainer.strategy.offload", "true", "--gpus", "24"]
    offload += ["--model.offload_activations", "true", "--model.gradient_checkpointing", "true"]
    fsdp = read("--trainer.strategy", "lightning_modules.training.fsdp.FullyShardedStrategy", *offload).training
    assert (fsdp.offload, fsdp.offload_activations, fsdp.gpus) == (True, True, 24)


@pytest.mark.parametrize(
    ("options", "moments", "copy"),
    [
        (["--model.optimizer", "torch.optim.SGD", "--model.optimizer.momentum", "0.9"], 1, True),
        (["--model.optimizer", "torch.optim.AdamW", "--model.optimizer.fused", "true"], 2, False),
        (["--model.optimizer", "torch.optim.ASGD"], 2, True),
    ],
)
def test_optimizers(read, options, moments, copy):
    experiment = read(*options)
    assert (experiment.training.moments, experiment.training.step_copy) == (moments, copy)


REFUSED = {
    "model.context_length": ("250", "context_length"),
    "trainer.precision": ("transformer-engine", "`trainer.precision`"),
    "trainer.strategy": ("fsdp", "`trainer.strategy`"),
    "model.pretrained_model_name_or_path": ("./nowhere", "nowhere"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_refuses_a_value_is_named(option, read):
    value, named = REFUSED[option]
    with pytest.raises(ValueError, match=named):
        read(f"--{option}", value)
