from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_modules.batch import pack_sequence
from lightning_modules.models.backbone import Backbone
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.models.loading.load import load_backbone, load_config, load_frozen
from tests.conftest import tiny_config, tiny_model
from tests.support.adapters import export_adapters

BARE = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float64"])
def test_dtype(model_dir, dtype):
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert next(load_backbone(ModelConfig(str(model_dir), dtype=dtype)).parameters()).dtype == expected


def test_bare_config_file_and_inline_config_give_random_weights(tmp_path):
    tiny_config("qwen2", 60).save_pretrained(tmp_path)
    from_file = load_backbone(ModelConfig(str(tmp_path / "config.json")))
    assert from_file.base_model.config.model_type == "qwen2"
    assert from_file.vocabulary_size == 60
    inline = load_backbone(ModelConfig(model_config=BARE))
    assert inline.vocabulary_size == 50
    assert next(inline.parameters()).dtype == torch.float32


def test_config_overrides_are_merged(model_dir):
    config = load_config(
        ModelConfig(
            str(model_dir), model_config={"rope_parameters": {"rope_theta": 5e5}, "max_position_embeddings": 99}
        )
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    backbone = load_backbone(ModelConfig(str(model_dir), model_config={"rope_parameters": {"rope_theta": 5e5}}))
    plain = load_backbone(ModelConfig(str(model_dir)))
    assert not torch.equal(backbone.model.model.rotary_emb.inv_freq, plain.model.model.rotary_emb.inv_freq)


def test_overrides_of_one_kind_of_layer_keep_its_other_parameters(tmp_path):
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds["full_attention"] = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    tiny_config("gemma3_text", rope_parameters=kinds).save_pretrained(tmp_path)

    def load(**rope):
        return load_config(ModelConfig(f"{tmp_path}/config.json", model_config={"rope_parameters": rope}))

    kinds["full_attention"]["rope_theta"] = 5e6
    assert load(full_attention={"rope_theta": 5e6}).rope_parameters == kinds
    with pytest.raises(ValueError, match=r"'rope_theta' must be inside one of .*full_attention"):
        load(rope_theta=5e6)


def test_a_misspelt_config_key_is_named(model_dir):
    with pytest.raises(ValueError, match="rope_parametres"):
        load_config(ModelConfig(str(model_dir), model_config={"rope_parametres": {}}))


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c", "no spaces allowed"])
def test_wrong_path(path):
    with pytest.raises(ValueError, match=path):
        load_backbone(ModelConfig(path))


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_adapters_must_name_their_base_model(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match="does not name their base model"):
        load_backbone(ModelConfig(str(tmp_path)))


@torch.no_grad()
def test_a_folder_of_adapters_is_loaded_unmerged_with_the_config_of_its_training(tmp_path, tokenizer):
    trained, folder = export_adapters(tmp_path, tokenizer), tmp_path
    batch = pack_sequence([torch.arange(3, 90)])
    kept, merged, base = (load_frozen(ModelConfig(str(folder / name)), "cpu") for name in ("kept", "merged", "base"))
    assert torch.equal(kept(batch), Backbone(trained.eval())(batch)), "as in training"
    torch.testing.assert_close(kept(batch), merged(batch), atol=1e-4, rtol=1e-4)
    assert (kept(batch) - base(batch)).abs().max() > 0.1
    shell = load_backbone(ModelConfig(str(folder / "kept")), with_weights=False)  # a process that gets its shards
    names = [[(name, each.shape) for name, each in backbone.named_parameters()] for backbone in (kept, shell)]
    assert names[0] == names[1]


def test_adapters_that_do_not_fit_and_other_versions_of_a_base(tmp_path, tokenizer):
    export_adapters(folder := tmp_path, tokenizer)
    config = ModelConfig(str(folder / "kept"))
    identity = model_identity(config)
    tiny_model("llama", seed=1).save_pretrained(folder / "base")
    assert model_identity(config) != identity
    weights = folder / "kept" / "adapter_model.safetensors"
    save_file({name: each[:1].clone() for name, each in load_file(weights).items()}, weights)
    with pytest.raises(ValueError, match="do not fit their base model"):
        load_backbone(config)
    weights.unlink()
    torch.save({}, folder / "kept" / "adapter_model.bin")
    with pytest.raises(ValueError, match="has no weights"):
        load_backbone(config)


@pytest.mark.parametrize(
    ("settings", "flash"),
    [
        (("cuda", "bfloat16", False), True),
        (("cuda", "float32", True), True),
        (("cuda", "float32", False), False),
        (("cuda", "auto", False), False),  # stored in float32
        (("cpu", "bfloat16", False), False),
    ],
)
def test_flash_attention_only_where_it_runs(model_dir, monkeypatch, settings, flash):
    chosen = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn")
    monkeypatch.setattr(
        "lightning_modules.models.loading.load._load_weights", lambda *a: chosen.append(a[-1]) or tiny_model()
    )
    device, dtype, autocast = settings
    load_backbone(ModelConfig(str(model_dir), dtype=dtype), device=device, autocast=autocast)
    assert (chosen[0]["attn_implementation"] == "flash_attention_2") == flash


@pytest.mark.parametrize(("package", "enough"), [("flash_attn", True), ("kernels", True), ("numpy", False)])
def test_flash_attention_comes_from_either_package(model_dir, monkeypatch, package, enough):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == package or None)
    monkeypatch.setattr("lightning_modules.models.loading.load.is_kernels_available", lambda: package == "kernels")
    monkeypatch.setattr("lightning_modules.models.loading.load._load_weights", lambda *_: tiny_model())
    with nullcontext() if enough else pytest.raises(ValueError, match=r"the extra `flash`.* or set `sdpa`"):
        load_backbone(ModelConfig(str(model_dir), attn_implementation="flash_attention_2"))
