"""What ``dtype: auto`` means for scoring on a CPU."""

import logging

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.dtypes import report_dtype, scoring_config, warn_of_slow_dtype
from lightning_modules.models.loading.identity import describe_model
from lightning_modules.models.loading.load import load_config, load_frozen
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.training.preflight import check_loaded
from tests.conftest import tiny_model


@pytest.fixture
def cpu(monkeypatch):
    """Pretend that the CPU has some instructions."""

    def pretend(*names):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(("avx2", *names), True), raising=False)

    for reported in (report_dtype, warn_of_slow_dtype):
        reported.cache_clear()
    yield pretend
    for reported in (report_dtype, warn_of_slow_dtype):
        reported.cache_clear()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, tokenizer):
    def make(dtype):
        folder = tmp_path_factory.mktemp("model")
        tiny_model("llama", len(tokenizer), seed=1).to(getattr(torch, dtype)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return {dtype: make(dtype) for dtype in ("float32", "bfloat16", "float16")}


@pytest.mark.parametrize(
    ("stored", "asked", "instructions", "loaded", "said"),
    [
        ("bfloat16", "auto", ["avx512_bf16"], "bfloat16", "in bfloat16, the stored type"),
        ("bfloat16", "auto", ["bf16"], "bfloat16", "in bfloat16, the stored type"),
        ("bfloat16", "auto", ["avx512_f"], "float32", "slow in bfloat16"),
        ("bfloat16", "bfloat16", ["avx512_f"], "bfloat16", ""),
        ("float16", "auto", ["avx512_bf16"], "float32", "slow in float16"),
        ("float16", "auto", ["avx512_fp16"], "float16", "in float16, the stored type"),
        ("bfloat16", "float32", ["avx512_bf16"], "float32", ""),
        ("float32", "auto", [], "float32", ""),
    ],
)
def test_auto_is_the_stored_type_unless_this_cpu_is_slow_in_it(
    folder_of, cpu, caplog, stored, asked, instructions, loaded, said
):
    cpu(*instructions)
    config, folder = ModelConfig(str(folder_of[stored]), dtype=asked), str(folder_of[stored])
    with caplog.at_level(logging.INFO):
        backbones = [load_frozen(config, "cpu") for _ in range(2)]
    lines = [line for line in caplog.messages if "dtype" in line]
    assert len(lines) == bool(said), "once, not for each model"
    assert said in "".join(lines)
    assert {str(backbone.base_model.dtype) for backbone in backbones} == {f"torch.{loaded}"}
    assert describe_model(config, load_tokenizer(folder)).dtype == loaded, "which the scores are stored under"


def test_only_a_cpu_that_is_known_to_be_slow_changes_the_type(folder_of, cpu, monkeypatch):
    cpu()
    config = ModelConfig(str(folder_of["bfloat16"]))
    stored = load_config(config)
    assert scoring_config(config, stored, "cpu").dtype == "float32"
    assert scoring_config(config, stored, "cuda") is config
    stored.quantization_config = {"quant_method": "gptq"}
    assert scoring_config(config, stored, "cpu") is config
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older versions of torch
    assert scoring_config(config, load_config(config), "cpu") is config


@pytest.mark.parametrize(
    ("precision", "dtype", "instructions", "said"),
    [
        ("32-true", "bfloat16", [], "`--model.dtype`"),
        ("bf16-mixed", "float32", [], "`trainer.precision: 32-true`"),
        ("bf16-true", "bfloat16", [], "`trainer.precision: 32-true`"),
        ("bf16-mixed", "float32", ["avx512_bf16"], ""),
        ("32-true", "float32", [], ""),
    ],
)
def test_a_run_in_a_slow_type_names_the_setting_once(folder_of, cpu, caplog, precision, dtype, instructions, said):
    cpu(*instructions)
    backbone = load_frozen(ModelConfig(str(folder_of[dtype]), dtype=dtype), "cpu")
    trainer = Trainer(accelerator="cpu", precision=precision, logger=False)
    for _ in range(2):
        check_loaded(backbone, trainer)
    lines = [line for line in caplog.messages if line.startswith("This CPU is slow")]
    assert len(lines) == bool(said)
    assert said in "".join(lines)
