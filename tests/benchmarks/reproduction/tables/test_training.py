import contextlib
import io
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from transformers import LlamaConfig

from benchmarks.reproduction.tables.published import find_table, published
from benchmarks.reproduction.tables.training import CONFIGS, Run, script, table_runs
from lightning_modules.models.context_extension.extend import extend_config
from tests.support.commands import longce


def parsed(words):
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        longce(*words, "--print_config")
    return yaml.safe_load(printed.getvalue())


SETTINGS = {  # objective, model, extension, short context, stride, data, rows a step on 8 GPUs, learning rate
    "A-LongCE-K1k-d1k": ("LongCE", "Llama-2-7b-hf", "eabf", 1024, 1024, "PG19DataModule", 64, 2e-5),
    "B-LongCE": ("LongCE", "Llama-2-7b-hf", "pi", 4096, 1024, "PG19DataModule", 64, 2e-5),
    "Mistral-LongCE": ("LongCE", "Mistral-7B-v0.1", "eabf", 4096, 1024, "PileArxivDataModule", 8, 1e-6),
    "Llama-2-13B-CE": ("CrossEntropy", "Llama-2-13b-hf", "eabf", 4096, 1024, "PileArxivDataModule", 8, 2e-5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_commands_mean_what_the_paper_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    config = parsed(Run(name, (50, 100, 200), tmp_path).fit().words)
    model, data, trainer = config["model"], config["data"], config["trainer"]
    rows = 8 * trainer["accumulate_grad_batches"] * data["init_args"].get("batch_size", 1)
    found = (
        model["objective"]["class_path"].rpartition(".")[2],
        model["pretrained_model_name_or_path"].rpartition("/")[2],
        model["context_extension"]["method"],
        model["context_length"],
        model["stride"],
        data["class_path"].rpartition(".")[2],
        rows,
        model["optimizer"]["init_args"]["lr"],
    )
    assert found == SETTINGS[name]
    assert model["optimizer"]["init_args"]["betas"] == [0.9, 0.95]
    assert model["optimizer"]["init_args"]["weight_decay"] == 0.0
    assert model["context_extension"]["target_length"] == data["init_args"]["sequence_length"] == 32768
    assert trainer["max_steps"] == 200
    if "LongCE" in name:
        assert model["objective"]["init_args"]["gamma"] == 5.0
    assert (model["lr_scheduler"]["init_args"]["start_factor"], model["lr_scheduler"]["init_args"]["total_iters"]) == (
        0.05,
        19,  # 20 steps of warm-up, and a constant rate from then on: weights after 50 steps are those of a run of 50
    )


def test_every_run_has_configs_that_exist():
    for entry in published()["runs"].values():
        assert all((CONFIGS / "experiments" / f"{layer}.yaml").is_file() for layer in entry["configs"])


def test_the_script_passes_over_what_is_done(tmp_path):
    table = find_table("table10")
    text = script(table_runs(table, tmp_path / "my runs", ["--trainer.devices", "2"]), table)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "longce").write_text(f'#!/bin/sh\necho "$*" >> "{tmp_path}/calls"\n')
    (bin_folder / "longce").chmod(0o755)
    done = tmp_path / "my runs" / "models" / "A-CE-200" / "config.json"
    done.parent.mkdir(parents=True)
    done.touch()
    shell = shutil.which("sh")
    subprocess.run([shell, "-c", text], check=True, env={"PATH": f"{bin_folder}:/usr/bin:/bin"})
    calls = [shlex.split(line)[:1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [["fit"], ["evaluate"], ["fit"], ["export"], ["evaluate"], ["reproduce"]]
    assert "--trainer.devices 2" in (tmp_path / "calls").read_text()


def test_needles_with_and_without_a_higher_base_are_not_mixed_up(tmp_path):
    """Figures 10 and 11 are of the same models, and of tasks with the same names."""
    for name in ("figure10", "figure11"):
        table = find_table(name)
        text = script(table_runs(table, tmp_path), table)
        *_, last = text.splitlines()
        assert last.endswith(f"--scores {tmp_path}/scores/*/{name}")
        asked = [shlex.split(line) for line in text.splitlines() if "longce evaluate" in line]
        assert [words[words.index("--output") + 1] for words in asked] == [
            f"{tmp_path}/scores/{run}-200/{name}" for run in ("A-CE", "A-LongCE")
        ]
        lengths = [word for word in asked[0] if word.isdigit() and int(word) > 1000]
        assert [f"needle {length}" for length in lengths] == list(table.columns)
    extension = yaml.safe_load(asked[0][asked[0].index("--context_extension") + 1])
    config = LlamaConfig(max_position_embeddings=4096)
    bases = []
    for each in ({"method": "eabf", "original_length": 4096, "target_length": 32768}, extension):
        extend_config(config, each)
        bases.append(config.rope_parameters["rope_theta"])
    assert bases == [500_000, 2_000_000]
    assert config.max_position_embeddings == int(lengths[-1])


@pytest.mark.slow
def test_planned_times_contain_those_of_the_paper(tmp_path, monkeypatch, capsys):
    """The hours of Table 7 on 8 A100 with 80 GB, at assumed rates."""
    monkeypatch.chdir(CONFIGS.parent)
    # The sizes of Llama-2-7B are the defaults of its architecture.
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama2")
    table = find_table("table7")
    hours = {table.runs[row]: cells[0] for row, cells in table.rows.items()}
    model = ["--model.pretrained_model_name_or_path", str(tmp_path / "llama2")]
    for run in table_runs(table, tmp_path, model):
        longce(*shlex.split(run.plan())[1:])
        configured = next(line for line in capsys.readouterr().out.splitlines() if " *  " in line)
        low, high = re.search(r"([\d.]+) to ([\d.]+) +[\d.]+ to [\d.]+$", configured).groups()
        assert float(low) < hours.pop(run.name) < float(high), configured
    assert not hours
