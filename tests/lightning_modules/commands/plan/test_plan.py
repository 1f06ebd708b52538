"""`longce plan` as a user runs it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_modules.commands.cli.main import main
from lightning_modules.commands.plan.hardware import GPU, GPUS
from lightning_modules.commands.plan.memory import Training
from lightning_modules.commands.plan.plan import PAPER_OVERHEAD, Planner
from lightning_modules.commands.plan.remedies import possible_changes
from lightning_modules.commands.plan.report import report
from lightning_modules.commands.plan.settings import Experiment, Judge

CONFIGS = Path(__file__).parents[4] / "configs"
LAYERS = ["-c", str(CONFIGS / "base.yaml"), "-c", str(CONFIGS / "experiments/longce_pg19.yaml")]


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    def run(*options, refused=False):
        monkeypatch.setattr(sys, "argv", ["longce"])
        if not refused:
            main(["plan", *options])
            return capsys.readouterr().out
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
    model, evaluator = (str(tmp_path / name / "config.json") for name in llamas)
    return [*LAYERS, "--model.pretrained_model_name_or_path", model, "--evaluator", evaluator]


def test_gpus_that_share_rows_keep_a_part_of_their_activations(plan, paper, tmp_path):
    output, long = tmp_path / "plan.json", [*paper, "--data.sequence_length", "524288", "--gpu", "H100"]
    strategies = {"configs/strategies/fsdp.yaml": 64, "configs/strategies/ulysses.yaml": 4}
    plans = []
    for strategy, rows in strategies.items():
        layer = ["-c", str(CONFIGS.parent / strategy)]
        plan(*LAYERS, *layer, *long[len(LAYERS) :], "--gpus", "8", "--output", str(output))
        plans.append(json.loads(output.read_text()))
        assert plans[-1]["run"]["rows_per_step"] == rows
    alone, shared = (numbers["memory"]["phases"]["backward pass"] for numbers in plans)
    assert {name: size / 8 for name, size in alone.items()} == pytest.approx(shared)
    assert not plans[0]["memory"]["fits"]
    assert plans[1]["memory"]["fits"]
    seconds, accumulated = ([numbers["cost"]["LongCE"]["step_seconds"] for numbers in plans], (8, 4))
    assert seconds[1] / seconds[0] == pytest.approx(accumulated[1] / accumulated[0] / 8)
    speeds = [numbers["cost"]["LongCE"]["tokens_per_second"] for numbers in plans]
    assert speeds[0] == pytest.approx(speeds[1], rel=1e-6)
    assert any("shared by GPUs" in note for note in plans[1]["notes"])
    message = plan(*LAYERS, *layer, *long[len(LAYERS) :], "--gpus", "12", refused=True)
    assert "12 process(es) do not form groups of 8" in message


def test_the_papers_run(plan, paper, tmp_path):
    output = tmp_path / "plan.json"
    options = ["--gpu", "H200", "--gpus", "8", "--price_per_gpu_hour", "2", "--output", str(output)]
    text, numbers = plan(*paper, *options), json.loads(output.read_text())
    configured = numbers["training"][0]
    assert {(pair["context_length"], pair["stride"]) for pair in numbers["training"]} == set(PAPER_OVERHEAD)
    assert (configured["context_length"], configured["stride"]) == (4096, 1024)
    assert configured["authors_overhead"] == pytest.approx(0.70, abs=0.01)
    assert configured["overhead"] == pytest.approx(0.66, abs=0.01)
    assert "+79%" in text
    assert "+65%" in text
    assert numbers["run"]["rows_per_step"] == 64
    bill = numbers["cost"]["LongCE"]
    assert bill["step_seconds"] == configured["longce_step_seconds"]
    assert bill["gpu_hours"] == pytest.approx(8 * 200 * bill["step_seconds"] / 3600)
    assert bill["price"] == pytest.approx(2 * bill["gpu_hours"])
    assert bill["tokens_per_second"] == pytest.approx(64 * 32768 / bill["step_seconds"])
    assert numbers["memory"]["fits"]
    assert numbers["scoring"]["validation_memory"]["needed"] == pytest.approx(126, abs=1), "what the config says"
    scoring = numbers["scoring"]
    assert scoring["with_evaluator"]["authors_overhead"] == pytest.approx(4.36, abs=0.01)
    assert scoring["evaluator_is_model"]["tflop"] < scoring["with_evaluator"]["tflop"]
    assert scoring["with_evaluator"]["floor_tflop"] < scoring["with_evaluator"]["tflop"]
    validation = scoring["validation"]  # 50 documents on 8 GPUs: 7 rounds
    assert validation["first_seconds"] == pytest.approx(7 * scoring["with_evaluator"]["seconds"])
    assert validation["later_seconds"] == pytest.approx(7 * scoring["plain_pass"]["seconds"])
    assert max(map(len, text.splitlines())) <= 125
    assert len(text.splitlines()) < 80


def test_the_same_run_where_it_fits(plan, paper):
    text = plan(*paper, "--gpu", "H200", "--model.lora", "{r: 8, target_modules: all-linear}")
    assert "DOES NOT FIT" not in text
    assert "What would make it fit" not in text
    assert "trained)" in text
    assert "`trainer.devices` is 'auto'" in text


def test_quantised_weights_are_planned_and_proposed(plan, paper):
    lora = ["--model.lora", "{r: 8, target_modules: all-linear}"]
    text = plan(*paper, "--gpu", "A100-40", *lora)
    assert "model.quantization: {load_in_4bit: true}" in text
    smaller = plan(*paper, "--gpu", "H200", *lora, "--model.quantization", "{load_in_4bit: true}")
    assert "the conversion of quantised weights" in smaller
    alone = plan(*paper, "--gpu", "H200", "--model.quantization", "{load_in_4bit: true}", refused=True)
    assert "set `model.lora`" in alone


def test_a_run_without_short_contexts_or_steps(plan, tmp_path):
    debug = [*LAYERS, "-c", str(CONFIGS / "debug.yaml"), "--gpu_tflops", "10", "--gpu_memory", "8"]
    text = plan(*debug, "--model.objective", "CrossEntropy", "--trainer.max_steps", "-1", "--price_per_gpu_hour", "1")
    assert "CrossEntropy, rows of 128" in text
    assert "no number of steps" in text
    assert "GPU-hours" not in text
    assert "a step" in text
    assert "short windows" not in text
    assert "float32 ones run at a fraction" in text


def test_a_pattern_is_planned(plan):
    extension = "{method: rerope, original_length: 64, target_length: 128}"
    text = plan(*LAYERS, "-c", str(CONFIGS / "debug.yaml"), "--model.context_extension", extension, "--gpu", "H200")
    assert "'rerope' is planned at the rates of flash attention" in " ".join(text.split())


def test_bad_input(plan, paper, tmp_path):
    (tmp_path / "file").touch()
    cases = {
        "known cards: A40": [*paper, "--gpu", "H300"],
        "known cards": paper,
        "price_per_gpu_hour": [*paper, "--gpu", "H200", "--price_per_gpu_hour", "-1"],
        "gpus": [*paper, "--gpu", "H200", "--gpus", "0"],
        "`sequence_length`": [*LAYERS[:2], "--model.model_config", "{model_type: gpt2}", "--gpu", "H200"],
        "Cannot write": [*paper, "--gpu", "H200", "--output", str(tmp_path / "file" / "plan.json")],
    }
    for message, options in cases.items():
        assert message in plan(*options, refused=True)


def test_the_config_that_a_run_saves_can_be_planned(plan, tmp_path):
    saved = tmp_path / "config.yaml"
    layers = [(CONFIGS / "debug.yaml").read_text(), "ckpt_path: null\nseed_everything: 0\n"]
    saved.write_text("\n".join(layers))
    assert "Plan for new llama" in plan("-c", str(saved), "--gpu", "L4")


def experiment(config, **training):
    settings = Training(32768, checkpointing="full", **training)
    return Experiment("m", config, None, "LongCE", settings, 1.0, False, 1, None, "AdamW", "bf16-mixed", None, None, ())


def test_remedies_fit_and_are_needed(llamas):
    planner = Planner(experiment(llamas["llama-3.1-8b"], gpus=2), GPUS["H100"])
    memory = planner.plan()["memory"]
    assert not memory["fits"]
    kinds = [tuple(remedy["changes"]) for remedy in memory["remedies"]]
    assert len(set(kinds)) == len(kinds)
    singles = {changes[0] for changes in kinds if len(changes) == 1}
    for remedy in memory["remedies"]:
        if not remedy["changes"][0].startswith("a card"):
            assert remedy["needed"] <= 80
        if len(remedy["changes"]) == 2:
            assert not singles & set(remedy["changes"])
    assert "model.lora: {r: 8, target_modules: all-linear}" in singles


def test_changes_exclude_each_other_where_they_must():
    training = Training(32768, gpus=2, sharding=replace(Training(1).sharding, gradient_copy=True))
    changes = {change.text: change for change in possible_changes(training, None, GPU("", 1, 150))}
    view = changes["trainer.strategy: DDPStrategy with gradient_as_bucket_view: true"]
    fsdp = changes["configs/strategies/fsdp.yaml: FSDP2 over 2 GPUs"]
    assert not view.goes_with(fsdp)
    assert view.goes_with(changes["model.lora: {r: 8, target_modules: all-linear}"])
    assert not any("bfloat16" in text for text in changes), "trained weights stay in float32"
    adapters = [change.text for change in possible_changes(training, {"r": 8}, GPU("", 1, 150))]
    assert "model.dtype: bfloat16 (of the frozen weights)" in adapters
    assert [text for text in changes if text.startswith("a card")] == [
        "a card with 178 GiB: B200",
        "a card with 191 GiB: MI300X",
    ]


def test_fewer_windows_or_stored_weights_cost_less(llamas):
    whole = experiment(llamas["llama-2-7b"])
    half = replace(whole, window_share=0.5)
    stored = replace(whole, stored_influence=True, training=replace(whole.training, short_pass=False))
    plans = [Planner(run, GPUS["H200"]).plan() for run in (whole, half, stored)]
    steps = [plan["cost"]["LongCE"]["step_seconds"] for plan in plans]
    ce = plans[0]["cost"]["cross entropy"]["step_seconds"]
    assert steps[1] - ce == pytest.approx((steps[0] - ce) / 2)
    assert steps[2] == ce
    assert "50% of the windows" in report(plans[1])
    assert "stored weights" in report(plans[2])


def test_an_evaluator_with_windows_of_its_own(llamas):
    seven, eight = llamas.values()
    run = replace(experiment(seven), judge=Judge("e", eight, 1024, 1024, torch.bfloat16))
    scoring = Planner(run, GPUS["H200"]).plan()["scoring"]
    assert (scoring["context_length"], scoring["stride"]) == (1024, 1024)
    beside = scoring["validation_memory"]
    assert beside["lasting"]["evaluator"] == pytest.approx(8_030_261_248 * 2 / 2**30)
    assert beside["peak"] > scoring["evaluator_memory"]["peak"] + 4 * 25  # the training's weights, moments, gradients


def test_the_shipped_run_fits_its_card_and_the_cheaper_one_costs_less(plan, paper, tmp_path):
    numbers = []
    for layers in ([], ["-c", str(CONFIGS / "experiments/cheaper_longce.yaml")]):
        output = tmp_path / "plan.json"
        plan(*paper[:4], *layers, *paper[4:], "--gpu", "H200", "--gpus", "8", "--output", str(output))
        numbers.append(json.loads(output.read_text()))
    shipped, cheaper = numbers
    assert shipped["memory"]["fits"]
    assert shipped["memory"]["needed"] == pytest.approx(134, abs=1), "what the config says"
    assert (cheaper["run"]["stride"], cheaper["run"]["checkpointing"]) == (4096, "selective")
    shares = [each["training"][0]["short_pass_tflop"] for each in numbers]
    assert shares[1] / shares[0] == pytest.approx(0.4, abs=0.03), "what the config and the README say"


def test_what_fit_refuses_is_refused_and_what_is_left_out_is_said(plan, paper, tmp_path):
    wrong = plan(*paper, "--gpu", "H200", "--data.influence", "folder", refused=True)
    assert "would ignore the stored token weights" in wrong
    assert "has no 'rank'" in plan(*paper, "--gpu", "H200", "--model.lora", "{rank: 8}", refused=True)
    assert "is a folder" in plan(*paper, "--gpu", "H200", "--output", str(tmp_path), refused=True)
    options = ["--model.short_dtype", "float8", "--model.head_kernel", "cce", "--data.sequence_length", "4096"]
    text = plan(*paper, "--gpu", "H200", *options, "--model.objective", "CrossEntropy", "--weights_only", "true")
    assert "`short_dtype: float8`" in text
    assert "not as `cce`" in text
    assert "*" not in text.partition("MEMORY")[0].partition("TRAINING")[2], "K + d are longer than the row"
