import json
import shutil

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_modules.cli import main
from lightning_modules.export import KEY, export_checkpoint
from lightning_modules.long_context_lm import LongContextLM
from tests.lightning_modules.export.test_weights import logits


def checkpoint(path, model, **settings):
    """What a run that ended before its first step would have saved."""
    module = LongContextLM(model, context_length=48, stride=16, **settings)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=path.parent)
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    trainer.save_checkpoint(path)
    return module.backbone.model.eval()


@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}])
def test_neither_the_base_model_nor_its_config_is_needed(model_dir, tmp_path, monkeypatch, lora):
    shutil.copytree(model_dir, tmp_path / "base")
    changes = {"max_position_embeddings": 1234, "rope_parameters": {"rope_theta": 7e5}}
    trained = checkpoint(tmp_path / "a.ckpt", str(tmp_path / "base"), model_config=changes, lora=lora)
    shutil.rmtree(tmp_path / "base")
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", None)
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), tokenizer=str(model_dir))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(trained), rtol=1e-4, atol=1e-4)
    assert loaded.config.max_position_embeddings == 1234
    assert loaded.config.rope_parameters["rope_theta"] == 7e5


def test_the_command(model_dir, tmp_path, capsys):
    trained = checkpoint(tmp_path / "a.ckpt", str(model_dir), context_extension={**PI})
    words = [str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--tokenizer", str(model_dir)]
    main(["export", *words, "--legacy_rope_keys", "true", "--dtype", "bfloat16"])
    assert capsys.readouterr().out.strip().endswith(str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_scaling"]["rope_type"], config["dtype"]) == ("linear", "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, trained.lm_head.weight.to(torch.bfloat16))
    with pytest.raises(SystemExit) as stopped:
        main(["export", *words, "--adapters", "kept"])
    assert stopped.value.code == 2
    assert "the model has none" in capsys.readouterr().err


PI = {"method": "pi", "original_length": 64, "target_length": 512}


def test_a_checkpoint_with_only_what_was_trained_gives_adapters_and_no_merged_model(model_dir, tmp_path):
    lora = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": "gaussian"}
    checkpoint(tmp_path / "a.ckpt", str(model_dir), lora=lora)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content[KEY].keys() == {"config", "generation_config", "facts"}
    for name in list(content["state_dict"]):
        if "lora_" not in name and "modules_to_save" not in name:
            del content["state_dict"][name]
    torch.save(content, tmp_path / "slim.ckpt")
    arguments = [str(tmp_path / "slim.ckpt"), str(tmp_path / "out")]
    export_checkpoint(*arguments, adapters="kept", tokenizer=str(model_dir))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["init_lora_weights"] == "gaussian"
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(ValueError, match="is missing"):
        export_checkpoint(*arguments, tokenizer=str(model_dir))
    content["state_dict"].popitem()
    torch.save(content, tmp_path / "slim.ckpt")
    with pytest.raises(ValueError, match="is missing"):
        export_checkpoint(*arguments, adapters="kept", tokenizer=str(model_dir))
    assert not (tmp_path / "out").exists()


def torn(path):
    path.write_bytes(path.read_bytes()[:-2000])


def another(path):
    torch.save({"state_dict": {}, "hyper_parameters": {"lr": 1}}, path)


def hostile(path):
    torch.save({KEY: {}, "state_dict": {}, "call": shutil.rmtree}, path)


def weights_of_another(path):
    content = torch.load(path, weights_only=True)
    content["state_dict"]["backbone.model.extra"] = torch.zeros(1)
    torch.save(content, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (torn, "is torn or no checkpoint"),
        (another, "was not written by this version"),
        (hostile, "holds more than weights"),
        (weights_of_another, "'extra' is unknown"),
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder.*consolidate_checkpoint"),
        (lambda path: None, "names no tokenizer: give one by `--tokenizer`"),
    ],
)
def test_bad_checkpoints_are_refused_and_nothing_is_written(model_dir, tmp_path, damage, message):
    checkpoint(tmp_path / "a.ckpt", str(model_dir))
    damage(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_web_and_other_folders_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="not loaded from the web"):
        export_checkpoint("https://example.org/a.ckpt", str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("keep")
    with pytest.raises(ValueError, match="no earlier export"):
        export_checkpoint("https://example.org/a.ckpt", str(tmp_path / "out"))
    assert (tmp_path / "out" / "thesis.tex").read_text() == "keep"
