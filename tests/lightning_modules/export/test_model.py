import errno
import json
import multiprocessing
import os
import signal

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_modules.export import model
from lightning_modules.export.model import check_export, export_model
from lightning_modules.export.options import ExportOptions
from lightning_modules.training.facts import TrainingFacts
from lightning_modules.utilities import files
from tests.conftest import tiny_model
from tests.support.exports import adapted, export, logits, run_card

EXTENDED = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}


@pytest.fixture
def base(tmp_path):
    """A model in a folder, and adapters trained on it with its positions interpolated."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    trained = adapted()
    trained.get_base_model().load_state_dict(tiny_model("llama").state_dict(), strict=False)
    config = trained.get_base_model().config
    config.rope_parameters = EXTENDED["rope_parameters"]
    rotary = type(trained.get_base_model().model.rotary_emb)(config)
    trained.get_base_model().model.rotary_emb = rotary
    return trained, TrainingFacts(base_model=str(tmp_path / "base"), base_is_local=True, changes=EXTENDED)


def test_adapters_kept_apart_load_with_the_base_in_their_folder_and_not_without(base, tmp_path):
    trained, facts = base
    options = ExportOptions("kept")
    export_model(trained, None, tmp_path / "out", options=options, facts=facts)
    config = AutoConfig.from_pretrained(tmp_path / "out" / "base")
    right = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=config)
    loaded = PeftModel.from_pretrained(right, tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(trained), rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "out" / "base" / "config.json").read_text())["rope_theta"] is None

    # What loads the base model by itself computes other numbers: nobody can tell it, but the card says so.
    wrong = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    assert (logits(wrong) - logits(trained)).abs().max() > 0.1
    assert "**compute other results, without an error**" in (tmp_path / "out" / "README.md").read_text()
    # What asks the adapter for its base is told to look into the card.
    hub = TrainingFacts(base_model="meta-llama/x", revision="0123abc", changes=EXTENDED)
    for name, source in (("out", facts), ("hub", hub)):
        export_model(trained, None, tmp_path / name, options=ExportOptions("kept"), facts=source)
        for loader in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
            with pytest.raises((OSError, ValueError), match=r"with the config in base/, see README\.md"):
                loader.from_pretrained(str(tmp_path / name))
    assert (
        'from_pretrained("meta-llama/x", config=config, revision="0123abc")' in (tmp_path / "hub/README.md").read_text()
    )
    assert json.loads((tmp_path / "hub" / "adapter_config.json").read_text())["revision"] == "0123abc"


def test_the_card_says_what_was_done(tmp_path, tokenizer):
    facts = TrainingFacts(
        base_model="meta-llama/Llama-2-7b-hf",
        revision="0123abc",
        changes={"context_extension": {"method": "pi", "original_length": 4096, "target_length": 32768, "base": None}},
        objective={"name": "LongCE", "gamma": 5.0},
        context_length=4096,
        stride=1024,
        optimizer={"name": "AdamW", "lr": 2e-5, "betas": [0.9, 0.95]},
        steps=200,
        tokens_per_step=2097152,
        data="PG19DataModule",
        dataset="emozilla/pg19",
        tokenizer="/home/me/tokenizer",
        metrics={"val/longppl": 2.71828},
        metrics_step=150,
        versions={"longce": "0.1.0"},
    )
    export_model(adapted(), tokenizer, tmp_path / "out", options=ExportOptions(), facts=facts)
    card = (tmp_path / "out" / "README.md").read_text()
    front_matter = yaml.safe_load(card.split("---\n")[1])
    assert front_matter["base_model"] == "meta-llama/Llama-2-7b-hf"
    assert front_matter["library_name"] == "transformers"
    assert front_matter["datasets"] == ["emozilla/pg19"]
    assert "revision `0123abc`" in card
    described = json.loads(card.split("```json\n")[1].split("```")[0])
    assert described.items() >= {"steps": 200, "context_length": 4096, "metrics": {"val/longppl": 2.71828}}.items()
    assert described["objective"] == facts.objective
    text = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".md", ".json"))
    assert "/home/me" not in text
    assert str(tmp_path) not in text
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ba ce").input_ids == tokenizer("ba ce").input_ids
    assert TrainingFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize("code", ["merged", "kept"])
def test_the_lines_of_the_card_load_the_model(base, code, tmp_path, monkeypatch, tokenizer):
    trained, facts = base
    export_model(trained, tokenizer, tmp_path / "out", options=ExportOptions(code), facts=facts)
    names = run_card(tmp_path / "out", monkeypatch)
    torch.testing.assert_close(logits(names["model"]), logits(trained), rtol=1e-4, atol=1e-4)
    assert names["tokenizer"]("ba").input_ids == tokenizer("ba").input_ids


@pytest.mark.parametrize(
    ("trained", "facts", "options", "named"),
    [
        (lambda: tiny_model(), {}, {"adapters": "kept"}, "`adapters: kept`"),
        (adapted, {}, {"adapters": "kept"}, "`adapters: kept`"),
        (lambda: adapted(init_lora_weights="pissa"), {"base_model": "a/b"}, {"adapters": "kept"}, "`init_lora_weights"),
        (adapted, {}, {"eabf_as_abf": True}, "`eabf_as_abf`"),
        (lambda: tiny_model(), {}, {"adapters": "kept", "dtype": "bfloat16"}, "`dtype"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_written(trained, facts, options, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        export(trained(), tmp_path / "out", TrainingFacts(**facts), **options)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file"):
        check_export(tiny_model(), tmp_path / "file" / "out", ExportOptions(), TrainingFacts())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_quantized_base_is_not_merged(tmp_path):
    trained = adapted()
    trained.get_base_model().config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(ValueError, match="'kept'"):
        export(trained, tmp_path / "out")
    # Weights that are stored in few bits are so by the base's own config; others by the lines of the card.
    for name, quantization in (("stored", None), ("loaded", {"load_in_4bit": True})):
        facts = TrainingFacts(base_model="a/b", quantization=quantization)
        export_model(trained, None, tmp_path / name, options=ExportOptions("kept"), facts=facts)
        content = json.loads((tmp_path / name / "base" / "config.json").read_text())
        assert ("quantization_config" in content) == (name == "stored")
        card = (tmp_path / name / "README.md").read_text()
        assert ("quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)" in card) == (name == "loaded")


def test_only_an_earlier_export_is_replaced(tmp_path, caplog):
    target = tmp_path / "out"
    export(tiny_model(seed=0), target)
    unsaved = tiny_model(seed=1)
    unsaved.generation_config.temperature = 0.5  # without sampling, as some published models have it
    unsaved.generation_config.do_sample = False
    export(unsaved, target)
    assert "was not exported" in caplog.text
    (target / "notes.txt").write_text("keep")
    tiny_model().save_pretrained(tmp_path / "model")  # has a config.json, too
    (tmp_path / "file").write_text("keep")
    for name in ("out", "model", "file"):
        with pytest.raises(ValueError, match=f"`output_dir`.*{name}"):
            export(tiny_model(), tmp_path / name)
    assert (target / "notes.txt").read_text() == "keep"
    (target / "notes.txt").unlink()
    with pytest.raises(ValueError, match="base model"):
        export(tiny_model(), target, TrainingFacts(base_model=str(target), base_is_local=True))
    (tmp_path / "empty").mkdir()
    export(tiny_model(), tmp_path / "empty")
    (tmp_path / "link").symlink_to("empty")
    umask = os.umask(0o027)
    export(tiny_model(), tmp_path / "link")
    os.umask(umask)
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "link").unlink()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "empty").iterdir()} == {0o640}
    assert {path.name for path in tmp_path.iterdir()} == {"out", "model", "file", "empty"}


def _killed(target, where):
    def kill(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    module, name = {
        "while weights are written": (model, "_write_merged"),
        "before the card": (model, "model_card"),
        "before the exchange": (files, "_swap_folders"),
        "after the exchange": (files.shutil, "rmtree"),
    }[where]
    if where == "after the exchange":
        original = files._swap_folders
        files._swap_folders = lambda *a: (original(*a), setattr(module, name, kill))
    else:
        setattr(module, name, kill)
    export(tiny_model(seed=1), target)


@pytest.mark.parametrize(
    ("where", "seed"),
    [("while weights are written", 0), ("before the card", 0), ("before the exchange", 0), ("after the exchange", 1)],
)
def test_a_kill_leaves_the_old_export_or_the_new_one(where, seed, tmp_path):
    export(tiny_model(seed=0), tmp_path / "out")
    child = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "out", where))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(tiny_model(seed=seed)))
    export(tiny_model(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the next one clears up"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_leaves_the_old_export(error, tmp_path, monkeypatch):
    export(tiny_model(seed=0), tmp_path / "out")
    monkeypatch.setattr(model, "_write_merged", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(ValueError, match="No space left"):
        export(tiny_model(seed=1), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(tiny_model(seed=0)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
