import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.export.model import export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.export.rope import as_abf, guard_keys
from lightning_modules.models.context_extension.extend import extend_config
from lightning_modules.models.context_extension.methods import ContextExtension
from lightning_modules.training.facts import TrainingFacts
from tests.conftest import tiny_config, tiny_model
from tests.support.exports import logits, run_card

METHODS = ("none", "pi", "abf", "ntk", "llama3", "yarn", "dynamic_ntk", "longrope", "eabf")


def extended(model_type, method):
    extra = {"long_factor": [2.0, 3.0, 4.0, 5.0]} if method == "longrope" else {}
    if method == "longnet":
        extra = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
    base = {"base": 2e6} if method in ("abf", "eabf") else {}
    config = tiny_config(model_type, head_dim=8)
    extend_config(config, ContextExtension(method, 64, 512, **extra, **base))
    return config


def base_of_4_45(content):
    """The RoPE base that transformers 4.45.2 takes from a `config.json`; it cannot compute with None."""
    default = 1e6 if content["model_type"] == "mixtral" else 1e4
    return content.get("rope_theta", default)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral"])
@pytest.mark.parametrize("method", METHODS)
def test_version_4_stops_and_version_5_is_the_same(model_type, method, tmp_path):
    config = extended(model_type, method)
    expected = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    content = json.loads(config.to_json_string(use_diff=False))
    if method != "none":
        assert base_of_4_45({**content, **guard_keys(content)}) is None
    (tmp_path / "config.json").write_text(json.dumps({**content, **guard_keys(content)}))
    read = AutoConfig.from_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_config(read).model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("model_type", ["qwen3", "phi3", "gpt_neox"])
def test_types_that_version_4_reads_otherwise_are_guarded(model_type):
    config = tiny_config(model_type)
    content = json.loads(config.to_json_string(use_diff=False))
    assert guard_keys(content) == {}, "its defaults are right"
    content["rope_parameters"] |= {"rope_theta": 7e5}
    assert guard_keys(content) == {"rotary_emb_base" if model_type == "gpt_neox" else "rope_theta": None}


def test_eabf_becomes_abf_on_request(tmp_path, caplog):
    config = extended("llama", "eabf")
    assert as_abf(config.rope_parameters) == {"rope_type": "default", "rope_theta": 2e6}
    with pytest.raises(ValueError, match="`eabf_as_abf`"):
        as_abf({"rope_type": "default", "rope_theta": 2e6})

    model = tiny_model("llama", num_hidden_layers=3, rope_parameters=config.rope_parameters)
    options = ExportOptions(eabf_as_abf=True)
    export_model(model, None, tmp_path / "out", options=options, facts=TrainingFacts())
    assert "logits differ" in caplog.text
    assert "**logits differ" in (tmp_path / "out" / "README.md").read_text()
    ids = torch.arange(200).unsqueeze(0)
    with torch.no_grad():
        difference = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits - model(ids).logits
    assert difference[:, :64].abs().max() < 1e-5
    assert difference[:, 64:].abs().max() > 1e-2
    assert model.config.rope_parameters["rope_type"] == "eabf", "the model itself is not changed"


@pytest.mark.parametrize("method", ["streaming_llm", "longnet"])
def test_a_pattern_goes_with_the_config_and_its_card_registers_it(method, tmp_path, monkeypatch):
    config = extended("llama", method)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    export_model(model, None, tmp_path / "out", options=ExportOptions(), facts=TrainingFacts())
    assert "register_rope_types()" in (tmp_path / "out" / "README.md").read_text()
    torch.testing.assert_close(logits(run_card(tmp_path / "out", monkeypatch)["model"]), logits(model))
