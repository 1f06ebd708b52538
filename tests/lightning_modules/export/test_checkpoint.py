import json
import shutil

import pytest
import torch
from lightning.pytorch import Trainer
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_modules.export.checkpoint import export_checkpoint
from lightning_modules.long_context_lm import LongContextLM
from longce.cli.main import main
from tests.conftest import tiny_model
from tests.support.exports import logits, run_card


class WithProbe(LongContextLM):
    """A user's module, which also trains a part that is not of the language model."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.probe = torch.nn.Linear(3, 1)


def checkpoint(path, model, kind=LongContextLM, **settings):
    """What a run that ended before its first step would have saved."""
    module = kind(model, context_length=48, stride=16, **settings)
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


CHANGES = {"max_position_embeddings": 1234, "rope_parameters": {"rope_theta": 7e5}}
LORA = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.fixture
def base(model_dir, tmp_path):
    return str(shutil.copytree(model_dir, tmp_path / "base"))


def check(folder, trained):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(loaded), logits(trained), rtol=1e-4, atol=1e-4)
    assert loaded.config.max_position_embeddings == 1234
    assert loaded.config.rope_parameters["rope_theta"] == 7e5


@pytest.mark.parametrize("kind", [LongContextLM, WithProbe])
def test_a_model_trained_in_full_needs_no_base(kind, base, model_dir, tmp_path, monkeypatch):
    trained = checkpoint(tmp_path / "a.ckpt", base, kind, model_config=CHANGES)
    shutil.rmtree(base)
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", None)
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), tokenizer=str(model_dir))
    check(tmp_path / "out", trained)


@pytest.mark.parametrize("kind", [LongContextLM, WithProbe])
def test_adapters_are_merged_into_the_base_that_they_were_trained_on(kind, base, model_dir, tmp_path, caplog):
    trained = checkpoint(tmp_path / "a.ckpt", base, kind, model_config=CHANGES, lora=LORA)
    arguments = [str(tmp_path / "a.ckpt"), str(tmp_path / "out")]
    export_checkpoint(*arguments, tokenizer=base)
    check(tmp_path / "out", trained)
    shutil.rmtree(tmp_path / "out")
    tiny_model("llama", 400, seed=9).save_pretrained(base)
    with pytest.raises(ValueError, match=base):
        export_checkpoint(*arguments, tokenizer=str(model_dir))
    shutil.rmtree(base)
    caplog.set_level("INFO")
    with pytest.raises(ValueError, match=f"No model at '{base}'"):
        export_checkpoint(*arguments, tokenizer=str(model_dir))
    assert "`--adapters kept` does not need the base model" in caplog.text
    assert not (tmp_path / "out").exists()


def test_paths_are_found_from_other_folders_and_published_only_where_they_are_needed(
    base, tmp_path, monkeypatch, tokenizer
):
    tokenizer.save_pretrained(base)
    monkeypatch.chdir(tmp_path)
    trained = checkpoint(tmp_path / "a.ckpt", "base", model_config=CHANGES, lora=LORA)
    monkeypatch.chdir("/")
    for adapters in ("merged", "kept"):
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / adapters), adapters=adapters, tokenizer=base)
        names = run_card(tmp_path / adapters, monkeypatch)
        torch.testing.assert_close(logits(names["model"]), logits(trained), rtol=1e-4, atol=1e-4)
    merged = [path.read_text() for path in (tmp_path / "merged").iterdir() if path.suffix in (".md", ".json")]
    assert not any(str(tmp_path) in text for text in merged)
    assert "A model trained from `base`." in (tmp_path / "merged" / "README.md").read_text()
    assert f"`{base}` is a folder of the training machine" in (tmp_path / "kept" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "kept" / "longce_export.json").read_text()


def test_the_type_of_the_base_and_its_generation_config_come_back(base, model_dir, tmp_path):
    GenerationConfig(do_sample=True, temperature=0.5).save_pretrained(base)
    trained = checkpoint(tmp_path / "a.ckpt", base, lora=LORA, dtype="bfloat16")
    export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), tokenizer=str(model_dir))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.model.norm.weight, trained.get_base_model().model.norm.weight)
    checkpoint(tmp_path / "full.ckpt", base)
    export_checkpoint(str(tmp_path / "full.ckpt"), str(tmp_path / "full"), tokenizer=str(model_dir))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "full").generation_config.temperature == 0.5


def test_the_command(model_dir, tmp_path, capsys):
    trained = checkpoint(tmp_path / "a.ckpt", str(model_dir), context_extension=PI)
    words = [str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--tokenizer", str(model_dir)]
    main(["export", *words, "--dtype", "bfloat16"])
    assert capsys.readouterr().out.strip().endswith(str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_parameters"]["rope_type"], config["dtype"]) == ("linear", "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, trained.lm_head.weight.to(torch.bfloat16))
    with pytest.raises(SystemExit) as stopped:
        main(["export", *words, "--adapters", "kept"])
    assert stopped.value.code == 2
    assert "the model has no adapters" in capsys.readouterr().err


def test_the_newest_checkpoint_of_a_run_is_exported(model_dir, tmp_path):
    for folder in ("run/checkpoints", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    trained = checkpoint(tmp_path / "run" / "checkpoints" / "step-3.ckpt", str(model_dir))
    export_checkpoint(str(tmp_path / "run"), str(tmp_path / "out"), tokenizer=str(model_dir))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, trained.lm_head.weight)
    with pytest.raises(ValueError, match="empty' has no complete checkpoint"):
        export_checkpoint(str(tmp_path / "empty"), str(tmp_path / "other"), tokenizer=str(model_dir))


PI = {"method": "pi", "original_length": 64, "target_length": 512}


def test_adapters_kept_apart_need_no_base(base, model_dir, tmp_path):
    trained = checkpoint(tmp_path / "a.ckpt", base, lora={**LORA, "init_lora_weights": "gaussian"})
    shutil.move(base, tmp_path / "elsewhere")
    arguments = [str(tmp_path / "a.ckpt"), str(tmp_path / "out")]
    export_checkpoint(*arguments, adapters="kept", tokenizer=str(model_dir))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["init_lora_weights"] == "gaussian"
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(own, tmp_path / "out")), logits(trained), rtol=1e-4, atol=1e-4
    )
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    content["state_dict"].popitem()
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="is missing"):
        export_checkpoint(*arguments, adapters="kept", tokenizer=str(model_dir))


def test_adapters_of_a_quantized_base_are_kept_apart(base, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama", 400, hidden_size=64, intermediate_size=128).save_pretrained(base)
    lora = {"r": 2, "target_modules": "all-linear"}
    trained = checkpoint(tmp_path / "a.ckpt", base, lora=lora, quantization={"load_in_4bit": True})
    arguments = [str(tmp_path / "a.ckpt"), str(tmp_path / "out")]
    export_checkpoint(*arguments, adapters="kept", tokenizer=base)
    assert "_load_in_4bit" not in (tmp_path / "out" / "README.md").read_text()
    names = run_card(tmp_path / "out", monkeypatch)
    layers = [module for module in names["base"].modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    assert len(layers) == 14
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False  # an operator of some processors that rounds more, as in training
    torch.testing.assert_close(logits(names["model"]), logits(trained), rtol=1e-4, atol=1e-4)


def changed(path, **values):
    torch.save(torch.load(path, weights_only=True) | values, path)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2000]), "`checkpoint`"),
        (lambda path: torch.save({"state_dict": {}, "hyper_parameters": {"lr": 1}}, path), "`checkpoint`"),
        (lambda path: changed(path, call=shutil.rmtree), "`checkpoint`"),
        (lambda path: changed(path, state_dict={"backbone.model.extra": torch.zeros(1)}), "`checkpoint`|extra|missing"),
        (lambda path: path.unlink(), "`checkpoint`"),
        (lambda path: None, "`--tokenizer`"),
    ],
)
def test_bad_checkpoints_are_refused_and_nothing_is_written(model_dir, tmp_path, damage, named):
    checkpoint(tmp_path / "a.ckpt", str(model_dir))
    damage(tmp_path / "a.ckpt")
    tokenizer = None if "tokenizer" in named else str(model_dir)
    with pytest.raises(ValueError, match=named):
        export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_other_folders_and_the_web_are_refused_before_anything_is_read(tmp_path):
    (tmp_path / "out").mkdir()
    for named in ("web", "thesis.tex"):
        with pytest.raises(ValueError, match=named):
            export_checkpoint("https://example.org/a.ckpt", str(tmp_path / "out"))
        (tmp_path / "out" / "thesis.tex").write_text("keep")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "keep"


def test_adapters_of_random_weights_bring_these_along(model_dir, tmp_path):
    model_config = {**json.loads((model_dir / "config.json").read_text()), **CHANGES}
    model_config["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e5}
    for name in ("architectures", "transformers_version", "dtype"):
        del model_config[name]
    trained = checkpoint(tmp_path / "a.ckpt", None, model_config=model_config, lora=LORA)
    export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "out"), tokenizer=str(model_dir))
    check(tmp_path / "out", trained)
