"""Sizes that the weight files cannot have are refused before anything of such a size is built."""

import json
import shutil
import time

import pytest
import torch

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import check_model, load_backbone, load_config
from tests.conftest import tiny_model

HUGE = 10**9


@pytest.fixture
def folder_with(tmp_path):
    """A folder with a model whose config says something else than its weights."""

    def write(architecture, pickled=False, **values):
        folder = tmp_path / "model"
        model = tiny_model(architecture, attn_implementation="eager")
        model.save_pretrained(folder)
        if pickled:
            (folder / "model.safetensors").unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        config = json.loads((folder / "config.json").read_text())
        assert config.keys() >= values.keys()
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return ModelConfig(str(folder))

    return write


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("qwen2", "num_hidden_layers"),  # makes a list of such a length
        ("gpt2", "n_layer"),
        ("llama", "hidden_size"),
        ("llama", "vocab_size"),
        ("llama", "intermediate_size"),
        ("bloom", "n_head"),
        ("mixtral", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("mamba", "state_size"),
        ("opt", "max_position_embeddings"),
        ("gptj", "n_positions"),
    ],
)
def test_a_huge_size_ends_at_once(architecture, key, folder_with):
    config = folder_with(architecture, **{key: HUGE})
    for use in (check_model, load_backbone):
        started = time.monotonic()
        with pytest.raises(ValueError, match="config"):
            use(config)
        assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "values", [{"num_hidden_layers": 20}, {"intermediate_size": 12_000}, {"num_hidden_layers": 1e9}]
)
@pytest.mark.parametrize("pickled", [False, True])
def test_a_size_that_no_file_has_is_refused(pickled, values, folder_with):
    with pytest.raises(ValueError, match="config"):
        check_model(folder_with("llama", pickled=pickled, **values))


def test_layers_are_bounded_without_weight_files(folder_with, tmp_path):
    config = folder_with("qwen2", num_hidden_layers=HUGE)
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "config.json")
    for model in (
        ModelConfig(str(tmp_path / "config.json")),
        ModelConfig(None, model_config={"model_type": "qwen2", "num_hidden_layers": HUGE}),
        ModelConfig(config.pretrained_model_name_or_path, model_config={"num_hidden_layers": HUGE}),
    ):
        with pytest.raises(ValueError, match="num_hidden_layers"):
            load_config(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gemma3_text", "mamba", "gptj", "opt"])
@pytest.mark.parametrize("pickled", [False, True])
def test_models_as_they_are_stored_are_accepted(architecture, pickled, folder_with):
    check_model(folder_with(architecture, pickled=pickled))
