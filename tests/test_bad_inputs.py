"""Bad input through the command line: status 2, no traceback, and words that say what is wrong."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import tiny_model
from tests.support.commands import longce, refused
from tests.support.experiments import experiment, text_data

BASE = str(Path(__file__).parent.parent / "configs" / "base.yaml")
DOCUMENT = json.dumps({"text": "ba ce di fo gu ka le mi " * 40})


@pytest.fixture(scope="session")
def place(tmp_path_factory, corpus, model_dir):
    """A folder with text, records and an experiment that would run."""
    folder = tmp_path_factory.mktemp("bad")
    for number in range(3):
        (folder / f"{number}.txt").write_text(corpus[number])
    (folder / "good.jsonl").write_text(3 * (DOCUMENT + "\n"))
    data = text_data(model_dir, folder / "good.jsonl", validation=str(folder / "0.txt"), sequence_length=128)
    config = experiment(model_dir, data, max_steps=1)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """What a command says of the experiment with some options more."""

    def command(*arguments, name="fit"):
        monkeypatch.chdir(tmp_path)
        return refused(name, "-c", BASE, "-c", place / "experiment.yaml", *arguments)

    return command


CONFIGS = {
    "twice": ("model:\n  stride: 16\n  stride: 8\n", "'stride' is given twice, in lines 2 and 3"),
    "torn": ("model: {stride: [1", "the config ü.yaml"),
    "utf-16": ("model:\n  stride: 3\n".encode("utf-16"), "Save it as UTF-8"),
    "unknown key": ("m0del:\n  stride: 3\n", "m0del"),
    "base 60": ("trainer:\n  min_steps: 2:3:4\n", "2:3:4"),
    "null for settings": ("data:\n  init_args: null\n", "`data`"),
    "null in nested settings": ("data:\n  init_args:\n    sequence_length:\n", "sequence_length"),
    "no optimizer": ("model:\n  optimizer: null\n", "model.optimizer"),
    "no model": ("model: null\n", "`model` must be a mapping of settings"),
    "a class that is not there": ("trainer:\n  callbacks:\n    - class_path: no.such.Class\n", "no.such.Class"),
}


SLOW = ("utf-16", "base 60", "null in nested settings", "no optimizer")
"""Of configs that are refused by the same code as others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONFIGS]
)
def test_configs(name, run, tmp_path):
    content, words = CONFIGS[name]
    path = tmp_path / "the config ü.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in run("-c", path)


OPTIONS = {
    "trainer.min_steps": ["2:3:4"],
    "trainer.max_steps": ["-5"],
    "trainer.devices": ["0", "100000"],
    "trainer.accumulate_grad_batches": ["0"],
    "trainer.val_check_interval": ["0"],
    "trainer.gradient_clip_val": ["-1"],
    "trainer.limit_train_batches": ["0"],
    "model.context_length": ["112", "1e30", "0"],
    "model.stride": ["0", "-4"],
    "model.objective": ["torch.nn.Linear", "{no: [mapping"],
    "model.objective.gamma": ["1e999", "0.5"],
    "model.lora": ["{target_modules: [nosuch]}", "{target_modules: [q_proj], lora_alpha: .nan}", "{rank: 3}"],
    "model.model_config": ["{1: 2}", "{hiden_size: 3}", "{rope_parameters: 3}"],
    "model.context_extension": ["{method: pi, original_length: 64, target_length: 32}", "{method: pi}"],
    "model.attn_implementation": ["nosuch"],
    "data.num_workers": ["1000000"],
    "data.long_documents": ["{longer_than: 9, weight: 1e12}"],
    "data.curriculum": ["{sequence_length: 64, share: 1}"],
    "data.pose": ["{target_length: 128}", "{target_length: 256, chunks: 1}", "{target_length: 5000}"],
    "data.holdout": ["2"],
    "data.packing": ["worst"],
}
"""Values that an option refuses; the message has the option's name."""

VALUES = [
    ("model.lora", "{target_modules: [q_proj], r: 0}", "`r`"),
    ("model.model_config", "{num_hidden_layers: 0}", "`num_hidden_layers`"),
    ("model.model_config", "{vocab_size: 10}", "do not match its config"),
    ("model.context_extension", "{method: dynamic_ntk, original_length: 64, target_length: 128}", "dynamic"),
    ("model.pretrained_model_name_or_path", "", "No model at ''"),
    ("model.pretrained_model_name_or_path", "./nowhere", "./nowhere"),
    ("model.pretrained_model_name_or_path", "https://x/y", "No server answers"),
    ("data.tokenizer", "no/tokenizer/here", "no/tokenizer/here"),
    ("data.train", "/nowhere/*.jsonl", "No file at"),
    ("data.text_field", "body", "no text 'body'"),
    ("data.cache_dir", "/proc/longce", "LONGCE_CACHE"),
    ("nosuch", "1", "unknown option `--nosuch`"),
    ("ckpt_path", "s3://x/y", "s3://x/y"),
    ("trainer.devices", "-2", "The settings of `trainer` are not valid"),
]
"""Values that are refused by what they name."""


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_refuses_a_value_is_named(option, run):
    for value in OPTIONS[option]:
        message = run(f"--{option}={value}")
        assert option.rpartition(".")[2] in message, value
        assert len(message) < 8000


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value", "words"), VALUES, ids=lambda value: str(value)[:40])
def test_a_value_that_is_refused_is_named(option, value, words, run):
    assert words in run(f"--{option}={value}")


DEEPSPEED = "lightning.pytorch.strategies.DeepSpeedStrategy"


@pytest.mark.parametrize("value", ["deepspeed_stage_3_offload", DEEPSPEED])
def test_deepspeed_is_refused_and_its_package_is_not_asked_for(value, run, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", False)
    message = run(f"--trainer.strategy={value}")
    assert "DeepSpeed ZeRO and FSDP1 are not supported. Use FSDP2: add `-c configs/strategies/fsdp.yaml`" in message


def edited(source, folder, **changes):
    """A copy of a model with another config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def without_a_layer(folder):
    path = folder / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if "layers.1." not in name}
    save_file(tensors, path, metadata={"format": "pt"})


def with_a_slow_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    (folder / "vocab.json").write_text('{"<unk>": 0, "a": 1}')
    (folder / "merges.txt").write_text("#version\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')


def adapters_alone(folder):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


MODELS = {
    "adapters": (adapters_alone, "or give a local folder or another hub id"),
    "slow tokenizer": (with_a_slow_tokenizer, "(CTRLTokenizer) does not report the characters"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights, neither"),
    "torn": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "incomplete or damaged"),
    "a layer missing": (without_a_layer, "lack 9 tensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "its folder has no tokenizer files, such as"),
    "torn tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"version": '), "The tokenizer '"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "model_type"),
    "torn config": (lambda folder: (folder / "config.json").write_text('{"model_type": "lla'), "not a valid JSON"),
}
CHANGES = [
    ({"quantization_config": {"quant_method": "nosuch"}}, "quantized by 'nosuch'"),
    ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}, "'nosuch', which transformers does not support"),
    ({"model_type": "nosuch"}, "nosuch"),
    ({"model_type": "t5"}, "not causal LMs"),
    ({"hidden_act": "nosuch"}, "could not be loaded"),
    ({"vocab_size": 10}, "10 tokens"),
]


def scored(place, model, evaluator, *options):
    words = ["score", place / "0.txt", "--model", model, "--evaluator", evaluator]
    return refused(*words, "--context_length", "32", "--stride", "16", *options)


@pytest.mark.parametrize("name", MODELS)
def test_model_folders(name, place, model_dir, evaluator_dir, tmp_path):
    damage, words = MODELS[name]
    folder = edited(model_dir, tmp_path / "model")
    damage(folder)
    assert words in scored(place, folder, evaluator_dir)


@pytest.mark.parametrize(("changes", "words"), CHANGES, ids=str)
def test_model_configs(changes, words, place, model_dir, evaluator_dir, tmp_path):
    message = scored(place, edited(model_dir, tmp_path / "model", **changes), evaluator_dir)
    assert words in message
    assert len(message) < 3000


SCORE = [
    ("--context_length", "0", "`context_length`"),
    ("--stride", "-5", "`stride`"),
    ("--alpha", "1e999", "`alpha`"),
    ("--beta", "5", "`beta`"),
    ("--max_tokens", "0", "`max_tokens`"),
    ("--device", "cuda:9", "not available"),
    ("--output", "/proc/x.parquet", "Cannot write to the folder /proc"),
    ("--output", "no/folder/x.parquet", "`output`"),
    ("--cache_dir", "/proc/x", "LONGCE_CACHE"),
]


@pytest.mark.parametrize(("option", "value", "words"), SCORE)
def test_score_options(option, value, words, place, model_dir, evaluator_dir, monkeypatch):
    """Before any model is loaded."""
    monkeypatch.setattr("lightning_modules.scoring.scored_model.load_scorer", None)
    assert words in scored(place, model_dir, evaluator_dir, option, value)


def test_an_unknown_attention_is_refused(place, model_dir, evaluator_dir):
    assert "nosuch" in scored(place, model_dir, evaluator_dir, "--attn_implementation", "nosuch")


def test_score_files(model_dir, tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "utf16").write_bytes("text".encode("utf-16"))
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    names = ["empty", "utf16", "binary", "none", "."]
    for file in [*(tmp_path / name for name in names), "/dev/zero", ""]:
        message = refused("score", file, "--model", model_dir, "--evaluator", model_dir)
        assert Path(file).name in message
        assert len(message) < 1000


def test_files_of_records_are_not_shown_as_text(place, model_dir):
    words = ["inspect", place / "good.jsonl", "--evaluator", model_dir, "--model", model_dir]
    assert "good.jsonl' contains records, not one text" in refused(*words)


def test_a_compressed_text_is_shown_by_its_row(tmp_path, model_dir):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a text"))
    words = ["inspect", tmp_path / "a.txt.gz", "--evaluator", model_dir]
    assert "a.txt.gz' is compressed: choose a document with `--row`" in refused(*words)
    longce(*words, "--row", "0", "--output", tmp_path / "a.html")
    assert (tmp_path / "a.html").is_file()


def test_files_that_are_scored_twice(place, model_dir, evaluator_dir, tmp_path):
    (tmp_path / "link.txt").symlink_to(place / "0.txt")
    for again in (place / "0.txt", tmp_path / "link.txt"):
        words = ["score", place / "0.txt", again, "--model", model_dir, "--evaluator", evaluator_dir]
        assert f"'{again}' is given twice" in refused(*words)


def test_another_tokenizer_with_fewer_tokens(place, tmp_path, evaluator_dir, monkeypatch):
    """No token is out of range, and none means what it did."""
    words = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    words += ["--data.tokenizer", evaluator_dir, "--trainer.default_root_dir", tmp_path]
    with pytest.warns(UserWarning, match=r"of the 340 tokens of .* differ from those of the model"):
        longce(*words, folder=tmp_path)


@pytest.mark.slow
def test_adapters_of_another_config(run, place, tmp_path, monkeypatch):
    fit = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    fit += ["--model.lora", "{target_modules: [q_proj], r: 4, lora_alpha: 8}", "--trainer.default_root_dir", tmp_path]
    longce(*fit, folder=tmp_path)
    path = next(tmp_path.rglob("step-1.ckpt"))
    for lora, words in {
        "{target_modules: [q_proj], r: 8, lora_alpha: 8}": "is (4, 32) in it and (8, 32) in this run",
        "{target_modules: [q_proj], r: 4, lora_alpha: 16}": "`lora.lora_alpha` = 8, and this run has 16",
        "{target_modules: [k_proj], r: 4, lora_alpha: 8}": "set `lora` as in the run that wrote it",
    }.items():
        assert words in run("--ckpt_path", path, "--model.lora", lora)


@pytest.mark.slow
def test_checkpoints(run, tmp_path, place, monkeypatch):
    fit = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    longce(*fit, "--trainer.default_root_dir", tmp_path, folder=tmp_path)
    good = torch.load(next(tmp_path.rglob("step-1.ckpt")), weights_only=True)
    cases = {
        "a list": ([1, 2], "was not written by `longce fit`"),
        "no weights": ({**good, "state_dict": 3}, "was not written by `longce fit`"),
        "no optimizer": ({k: v for k, v in good.items() if k != "optimizer_states"}, "contains weights only"),
        "no schedule": ({k: v for k, v in good.items() if k != "lr_schedulers"}, "lacks lr_schedulers, without which"),
        "no loops": ({**good, "loops": {}}, "lacks the state of training"),
    }
    for name, (content, words) in cases.items():
        torch.save(content, tmp_path / f"{name}.ckpt")
        assert words in run("--ckpt_path", tmp_path / f"{name}.ckpt")
    torch.save(good, tmp_path / "good.ckpt")
    tiny_model("qwen2", 400).save_pretrained(tmp_path / "other")
    other = ["--model.pretrained_model_name_or_path", tmp_path / "other"]
    assert "is of another model" in run("--ckpt_path", tmp_path / "good.ckpt", *other)


@pytest.mark.slow
def test_other_commands(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "int.ckpt").write_bytes(b"")
    assert "is truncated" in refused("export", "int.ckpt", "out")
    assert "known cards" in run("--gpu", "nosuch", name="plan")
    assert "/nowhere" in run("--evaluator", "/nowhere", name="influence")
