"""Settings of the package and of the user on a CPU that is slow in bfloat16."""

import logging

import pytest
import torch
import yaml

from lightning_modules.models.loading.dtypes import report_dtype, warn_of_slow_dtype
from longce.cli.config_files import CONFIGS
from longce.cli.lightning_cli import LongceCLI
from longce.cli.main import main
from tests.conftest import tiny_model

PRECISION, DTYPE = "--trainer.precision", "--model.dtype"


@pytest.fixture
def start(tmp_path, tokenizer, book_folder, monkeypatch, caplog):
    """Start a command up to the moment when data and weights would be loaded."""
    tiny_model("llama", len(tokenizer), seed=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = {"tokenizer": str(tmp_path / "model"), "path": str(book_folder), "sequence_length": 64}
    own = {
        "model": {"pretrained_model_name_or_path": str(tmp_path / "model"), "context_length": 16, "stride": 16},
        "data": {"class_path": "datamodules.PG19DataModule", "init_args": data},
        "trainer": {"accelerator": "cpu", "logger": False, "callbacks": None, "strategy": "auto"},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(command, *words, capabilities=("avx2",), base=CONFIGS / "base.yaml"):
        started = []
        for reported in (report_dtype, warn_of_slow_dtype):
            reported.cache_clear()
        caplog.clear()
        caplog.set_level(logging.INFO)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["longce"])
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True), raising=False)
        found = lambda cli, _: started.append((cli.trainer.precision, cli.model.loading.dtype))  # noqa: E731
        monkeypatch.setattr(LongceCLI, "_run_subcommand", found)
        main([command, "-c", str(base), "-c", "own.yaml", *words])
        return *started[0], caplog.text

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", ["fit", pytest.param("predict", marks=pytest.mark.slow)])
def test_what_only_the_package_sets_becomes_float32_with_a_message(start, command):
    assert start(command, capabilities=("avx512_bf16",))[:2] == ("bf16-mixed", "float32")
    precision, dtype, said = start(command, DTYPE, "auto")
    assert (precision, dtype) == ("32-true", "float32")
    assert "`trainer.precision` is 32-true instead of the bf16-mixed of configs/base.yaml" in said
    assert "`dtype: auto` computes in float32" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_user_sets_is_kept_with_one_early_warning(start, tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {precision: bf16-mixed}")
    for words in ([PRECISION, "bf16-mixed"], [f"{PRECISION}=bf16-mixed"], ["-c", "mine.yaml"]):
        precision, _, said = start("fit", *words)
        assert precision == "bf16-mixed"
        assert said.count("slow in bfloat16") == 1
    assert start("fit", PRECISION, "32-true", DTYPE, "bfloat16")[:2] == ("32-true", "bfloat16")
    # The last one counts.
    assert start("fit", "-c", "mine.yaml", "-c", str(CONFIGS / "base.yaml"), "-c", "own.yaml")[0] == "32-true"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_packaged_config_wants_in_bfloat16_are_loaded_in_float32(start, tmp_path):
    (tmp_path / "corpus.yaml").write_text("model: {dtype: bfloat16}")
    packaged = CONFIGS / "experiments" / "longlora.yaml"
    assert yaml.safe_load(packaged.read_text())["model"]["dtype"] == "bfloat16"
    words = ["--data", "datamodules.PG19DataModule", "--trainer.callbacks", "null"]
    assert start("predict", "-c", str(packaged), *words)[1] == "float32"
    assert start("predict", "-c", "corpus.yaml", *words)[1] == "bfloat16"
