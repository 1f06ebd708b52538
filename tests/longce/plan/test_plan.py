"""`longce plan` as a user runs it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightning_modules.functional.windows import ShortContext
from longce.cli import lightning_cli
from longce.cli.lightning_cli import LongceCLI
from longce.cli.main import main
from longce.plan import shapes
from longce.plan.fitting import choose_checkpointing, find_fitting
from longce.plan.flops import ce_step_flops, necessary_flops, short_pass_flops
from longce.plan.hardware import GPU, GPUS, Rates
from longce.plan.memory import GIB, Training
from longce.plan.plan import Planner, make_planner, plan_checkpointing, plan_utilization
from longce.plan.settings import Curriculum, Experiment
from longce.plan.shapes import ModelShape
from longce.plan.sizes import ModelSizes
from tests.conftest import tiny_config

CONFIGS = Path(__file__).parents[3] / "configs"
LAYERS = ["-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / "experiments/longce_pg19.yaml")]
LORA = ["--model.lora", "{r: 8, target_modules: all-linear}"]


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """Runs the command; returns its numbers and its text, or what it refuses."""

    def run(*options, refused=False):
        monkeypatch.setattr(sys, "argv", ["longce"])
        output = tmp_path / "plan.json"
        if not refused:
            main(["plan", "--output", str(output), *options])
            return json.loads(output.read_text()), " ".join(capsys.readouterr().out.split())
        with pytest.raises(SystemExit) as stopped:
            main(["plan", *options])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def paper(tmp_path, llamas):
    """The shipped experiment at full size, without the hub."""
    for name, config in llamas.items():
        (tmp_path / name).mkdir()
        config.save_pretrained(tmp_path / name)
    return [*LAYERS, "--model.pretrained_model_name_or_path", str(tmp_path / "llama-2-7b" / "config.json")]


@pytest.mark.slow
def test_gpus_that_share_rows_keep_a_part_of_their_activations(plan, paper):
    def layered(strategy, gpus, **options):
        layer = [
            "-c",
            str(CONFIGS / "strategies" / strategy),
            *paper[len(LAYERS) :],
            "--data.sequence_length",
            "524288",
        ]
        return plan(*LAYERS, *layer, "--gpu", "H100", "--gpus", gpus, **options)

    (alone, _), (shared, _) = layered("fsdp.yaml", "8"), layered("ulysses.yaml", "8")
    assert (alone["run"]["rows_per_step"], shared["run"]["rows_per_step"]) == (64, 4)
    phases = [numbers["memory"]["phases"]["backward pass"] for numbers in (alone, shared)]
    assert {name: size / 8 for name, size in phases[0].items()} == pytest.approx(phases[1])
    assert (alone["memory"]["fits"], shared["memory"]["fits"]) == (False, True)
    bills = [numbers["training"][1] for numbers in (alone, shared)]
    # Accumulation is 8 batches of a whole sequence, or 4 of an eighth.
    assert bills[1]["step_seconds"][0] / bills[0]["step_seconds"][0] == pytest.approx(4 / 8 / 8)
    assert "= 8 must divide the number of processes, 12" in layered("ulysses.yaml", "12", refused=True)


@pytest.mark.slow
def test_the_papers_run(plan, paper):
    numbers, text = plan(*paper, "--gpu", "H200", "--gpus", "8")
    ce, bill = numbers["training"]
    pairs = [(row["context_length"], row["stride"]) for row in (ce, bill)]
    assert pairs == [(None, None), (4096, 1024)]
    assert bill["configured"]
    assert ce["step_seconds"][1] < bill["step_seconds"][1]
    assert bill["overhead"] == pytest.approx(0.66, abs=0.01)
    assert numbers["run"]["rows_per_step"] == 64
    low, high = bill["step_seconds"]
    assert high == pytest.approx(1.6 * low), "assumed rates"
    assert bill["gpu_hours"] == pytest.approx([8 * 200 * each / 3600 for each in (low, high)])
    assert bill["tokens_per_second"] == pytest.approx([64 * 32768 / each for each in (high, low)])
    assert (numbers["memory"]["fits"], numbers["fitting"]) == (True, None)
    assert numbers["memory"]["needed"] == pytest.approx(125, abs=1), "as the config reports"
    assert "{:.3g} to {:.3g}".format(*bill["gpu_hours"]) in text
    assert "GiB, fits" in text


@pytest.mark.slow
def test_adapters_and_quantized_weights(plan, paper):
    numbers, text = plan(*paper, "--gpu", "H200", *LORA)
    assert numbers["memory"]["fits"]
    assert "`trainer.devices` is 'auto'" in text
    quantized = ["--gpu", "H200", "--model.quantization", "{load_in_4bit: true}"]
    smaller, _ = plan(*paper, *LORA, *quantized)
    assert smaller["memory"]["needed"] < numbers["memory"]["needed"] - 8
    assert "set `model.lora`" in plan(*paper, *quantized, refused=True)


def test_a_run_without_short_contexts_or_steps(plan):
    debug = [*LAYERS, "-c", str(CONFIGS / "debug.yaml"), "--gpu_tflops", "10", "--gpu_memory", "8"]
    numbers, text = plan(*debug, "--model.objective", "CrossEntropy", "--trainer.max_steps", "-1")
    assert (numbers["run"]["objective"], numbers["run"]["tokens"]) == ("CrossEntropy", 128)
    assert [row["hours"] for row in numbers["training"] if row["configured"]] == [None]
    assert "GPU-hours" not in text
    assert "short windows" not in numbers["memory"]["phases"]


def test_the_config_that_a_run_saves_can_be_planned(plan, tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text((CONFIGS / "debug.yaml").read_text() + "\nckpt_path: null\nseed_everything: 0\n")
    assert plan("-c", str(saved), "--gpu", "L4")[0]["model"]["name"] == "new llama"


def experiment(config, **training):
    return Experiment("m", config, None, "LongCE", Training(32768, checkpointing="full", **training))


@pytest.mark.slow
def test_shorter_sequences_before_the_switch_cost_less(llamas):
    run = replace(experiment(llamas["llama-2-7b"]), max_steps=100, curriculum=Curriculum(8192, 0.8))
    row = Planner(run, GPUS["H200"], Rates()).plan()["training"][1]
    short = experiment(llamas["llama-2-7b"])
    short = replace(short, training=replace(short.training, tokens=8192))
    expected = Planner(short, GPUS["H200"], Rates()).plan()["training"][1]["step_seconds"].times(4)
    assert row["step_seconds_before_switch"] == pytest.approx(expected), "four sequences in place of one"
    hours = 0.8 * expected.low * 100 / 3600 + 0.2 * row["step_seconds"].low * 100 / 3600
    assert row["hours"].low == pytest.approx(hours)


# Llama-3.1-8B in bfloat16 needs 81.6 GiB at 32k, 79.5 with activation offload, 29.5 with FSDP2 on 8 GPUs, 18.1 with
# Ulysses as well.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "settings", "gpus"),
    [(80, ["activation offload"], 1), (75, ["FSDP2"], 8), (20, ["FSDP2", "Ulysses"], 8), (3, None, 0)],
)
def test_the_first_combination_that_fits(llamas, memory, settings, gpus):
    run = experiment(llamas["llama-3.1-8b"], dtype=torch.bfloat16, autocast=None, gpus=1)
    found = find_fitting(run, GPUS["H200"]._replace(memory=memory), ModelSizes(run.config))
    if settings is None:
        assert found is None
        return
    assert [name.partition(" (")[0] for name in found.settings] == settings
    assert found.gpus == gpus
    assert found.needed <= memory


@pytest.mark.slow
def test_layers_that_keep_their_activations_are_the_first_to_give_way(llamas):
    run = experiment(llamas["llama-3.1-8b"], dtype=torch.bfloat16, autocast=None, gpus=1, checkpointed_layers=8)
    found = find_fitting(run, GPUS["H200"], ModelSizes(run.config))
    assert found.settings == ["checkpointing of all layers (without model.checkpointed_layers)"]


def test_a_model_is_built_once_for_each_kind_of_adapters(monkeypatch):
    built = []
    make = ModelShape.of
    monkeypatch.setattr(ModelShape, "of", lambda config, lora=None: built.append(lora) or make(config, lora))
    run = experiment(tiny_config(), gpus=1)
    assert find_fitting(run, GPUS["H200"]._replace(memory=0.1), ModelSizes(run.config)) is None
    assert built == [None, {"r": 16, "target_modules": "all-linear"}]


@pytest.mark.slow
def test_sequences_are_not_split_with_attention_that_cannot_be(llamas):
    run = experiment(llamas["llama-3.1-8b"], dtype=torch.bfloat16, autocast=None, gpus=1)
    run = replace(run, attn_implementation="flash_attention_2")
    assert find_fitting(run, GPUS["H200"]._replace(memory=20), ModelSizes(run.config)) is None


def test_a_run_is_compared_with_the_peak_of_its_own_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["longce", "-c", str(CONFIGS / "debug.yaml"), "--data.batch_size", "3"])
    cli = LongceCLI(run=False)
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer = SimpleNamespace(strategy=strategy, world_size=2, num_devices=2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    shape = ModelShape.of(AutoConfig.for_model(**cli.config.model.model_config))
    sequence = necessary_flops(shape, 128) + short_pass_flops(shape, 128, ShortContext(32, 16))
    planned = plan_utilization(cli.make("model"), cli.config, trainer)
    assert planned == pytest.approx(sequence.total / 128 / (2 * 989.4e12))
    del cli.config.model["optimizer"]  # as for a class of the user that has no such argument
    assert plan_utilization(cli.make("model"), cli.config, trainer) == planned
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Other")
    assert plan_utilization(cli.make("model"), cli.config, trainer) is None


@pytest.mark.parametrize(
    "options",
    [
        {"model.shifted_sparse_attention": "64"},
        {"model.objective": "Scheduled", "model.objective.objective": "LongCE", "model.objective.start": "2"},
        {
            "model.objective": "Normalized",
            "model.objective.objective": "Scheduled",
            "model.objective.objective.objective": "LongCE",
            "model.objective.objective.start": "2",
        },
        {"data.curriculum": "{sequence_length: 64, share: 0.5}"},
    ],
)
def test_no_utilization_where_steps_differ_from_the_plan(options, monkeypatch):
    given = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["longce", "-c", str(CONFIGS / "debug.yaml"), *given])
    cli = LongceCLI(run=False)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), world_size=1, num_devices=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert make_planner(cli.make("model"), cli.config, GPUS["H100"]).peak_seconds_per_token() > 0
    assert plan_utilization(cli.make("model"), cli.config, trainer) is None


@pytest.mark.slow
def test_auto_recomputes_no_more_than_the_memory_needs(llamas, monkeypatch):
    """On each side of the memory that a step with less recomputation needs."""
    auto = experiment(llamas["llama-3.1-8b"], accumulates=False)
    auto = replace(auto, chooses_checkpointing=True, lora={"r": 8, "target_modules": "all-linear"})

    def needed(kind):
        return sizes.training_memory(replace(auto.training, checkpointing=kind), auto.lora).needed / GIB

    def chosen(memory, auto=auto):
        training = Planner(auto, GPU("card", 1.0, memory), Rates()).training
        return training.checkpointing, training.checkpointed_layers

    sizes = ModelSizes(auto.config)
    none, selective, full = map(needed, ("none", "selective", "full"))
    assert full < selective < none
    assert chosen(none / 0.95 + 0.1) == ("none", None)
    assert chosen(none / 0.95 - 0.1) == ("selective", 1)
    assert chosen(selective + 0.1) == ("selective", None), "a part of the memory is left free"
    assert chosen(full + 0.1) == ("full", None)
    assert chosen(full - 0.1) == ("full", None)
    assert chosen(2 * none, replace(auto, chooses_checkpointing=False)) == ("full", None)
    assert chosen(selective + 0.1, replace(auto, attn_implementation="eager")) == ("full", None)
    offloaded = replace(auto, training=replace(auto.training, offload_activations=True))
    assert chosen(1000.0, offloaded) == ("selective", None)
    # Classes of the hub that cannot checkpoint some of their layers.
    monkeypatch.setattr(shapes, "GradientCheckpointingLayer", type(None))
    assert chosen(none / 0.95 - 0.1) == ("selective", None)


@pytest.mark.slow
def test_auto_is_the_fastest_choice_that_fits(llamas):
    auto = experiment(llamas["llama-3.1-8b"], accumulates=False)
    auto = replace(auto, lora={"r": 8, "target_modules": "all-linear"})
    sizes = ModelSizes(auto.config)
    for memory in (56, 60, 70, 80, 150):
        times = {}
        for kind in ("none", "selective", "full"):
            for layers in range(1, 33):
                each = replace(auto.training, checkpointing=kind, checkpointed_layers=layers)
                whole = kind == "none" or layers < 32
                if sizes.training_memory(each, auto.lora).needed <= memory * GIB * (0.95 if whole else 1):
                    times[kind, layers] = ce_step_flops(sizes.shape(auto.lora), each.tokens, kind, layers).total
        kind, layers = min(times, key=times.get)
        found = choose_checkpointing(auto, GPU("card", 1.0, memory), sizes)
        assert (found.checkpointing, found.checkpointed_layers or 32) == (kind, layers)


@pytest.mark.parametrize(
    ("device", "memory", "settings", "expected"),
    [
        ("cuda", 80, [], (False, None)),
        ("cuda", 0, [], (True, None)),  # fits by no means
        ("cuda", 80, ["--trainer.precision", "transformer-engine"], (True, None)),  # the plan does not support it
        ("cpu", 80, [], (True, None)),
    ],
)
def test_a_run_gets_what_its_own_gpu_can_hold(device, memory, settings, expected, monkeypatch):
    words = ["longce", "-c", str(CONFIGS / "debug.yaml"), "--model.gradient_checkpointing", "auto", *settings]
    monkeypatch.setattr(sys, "argv", words)
    cli = LongceCLI(run=False)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), world_size=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Other")
    properties = SimpleNamespace(total_memory=memory * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert plan_checkpointing(cli.make("model"), cli.config, trainer) == expected


@pytest.mark.slow
def test_fit_resolves_auto_before_the_model_is_loaded(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(lightning_cli, "plan_checkpointing", lambda *run: asked.append(run) or ("selective", 1))
    words = ["fit", *LAYERS[:2], "-c", str(CONFIGS / "debug.yaml"), "--model.gradient_checkpointing", "auto"]
    words += ["--trainer.fast_dev_run", "1", "--trainer.default_root_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["longce", *words])
    cli = LongceCLI()
    assert len(asked) == 1
    assert cli.model.loading.gradient_checkpointing == "selective"
    layers = [each for each in cli.model.backbone.modules() if isinstance(each, GradientCheckpointingLayer)]
    assert [layer.gradient_checkpointing for layer in layers] == [True, *[False] * (len(layers) - 1)]
    assert len(layers) > 1


def test_auto_recomputes_eager_attention_whose_memory_is_not_planned():
    run = experiment(tiny_config(), gpus=1)
    chosen = [
        choose_checkpointing(replace(run, attn_implementation=each), GPUS["H200"], ModelSizes(run.config))
        for each in ("sdpa", "eager")
    ]
    assert [training.checkpointing for training in chosen] == ["none", "full"]
