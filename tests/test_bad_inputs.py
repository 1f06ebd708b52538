"""Bad input through the command line: status 2, no traceback, and words that say what is wrong."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
import zstandard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_modules.commands.cli.main import main
from lightning_modules.models.loading.checks import check_weight_files
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from tests.conftest import tiny_model

BASE = str(Path(__file__).parent.parent / "configs" / "base.yaml")
DOCUMENT = json.dumps({"text": "ba ce di fo gu ka le mi " * 40})


def refused(*arguments, capsys):
    """What the command says; it must end with status 2 and without a traceback."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    message = capsys.readouterr().err
    assert stopped.value.code == 2, message
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="session")
def place(tmp_path_factory, corpus, model_dir):
    """A folder with text, records and an experiment that would run."""
    folder = tmp_path_factory.mktemp("bad")
    for number in range(3):
        (folder / f"{number}.txt").write_text(corpus[number])
    (folder / "good.jsonl").write_text(3 * (DOCUMENT + "\n"))
    data = {"train": str(folder / "good.jsonl"), "validation": str(folder / "0.txt"), "tokenizer": str(model_dir)}
    config = {
        "model": {"pretrained_model_name_or_path": str(model_dir), "context_length": 32, "stride": 16},
        "data": {"class_path": "datamodules.TextDataModule", "init_args": {**data, "sequence_length": 128}},
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "32-true", "max_steps": 1},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch, capsys):
    """What a command says of the experiment with some options more."""

    def command(*arguments, name="fit"):
        monkeypatch.chdir(tmp_path)
        words = [name, "-c", BASE, "-c", place / "experiment.yaml", *arguments]
        monkeypatch.setattr(sys, "argv", ["longce", *map(str, words)])
        return refused(*words, capsys=capsys)

    return command


CONFIGS = {
    "twice": ("model:\n  stride: 16\n  stride: 8\n", "'stride' is given twice, in lines 2 and 3"),
    "group twice": ("model:\n  stride: 16\nmodel:\n  dtype: auto\n", "'model' is given twice, in lines 1 and 3"),
    "torn": ("model: {stride: [1", "the config ü.yaml"),
    "utf-16": ("model:\n  stride: 3\n".encode("utf-16"), "Save it as UTF-8"),
    "unknown key": ("m0del:\n  stride: 3\n", "m0del"),
    "base 60": ("trainer:\n  min_steps: 2:3:4\n", "2:3:4"),
    "null for settings": ("data:\n  init_args: null\n", "line 2: `init_args` is null"),
    "null in nested settings": ("data:\n  init_args:\n    sequence_length:\n", "sequence_length"),
    "null deeper": ("model:\n  objective: {class_path: LongCE, init_args: {gamma: null}}\n", "gamma"),
    "no optimizer": ("model:\n  optimizer: null\n", "model.optimizer"),
    "no model": ("model: null\n", "`model` must be a mapping of settings"),
    "a list for the model": ("model: [1]\n", "`model` must be a mapping of settings"),
    "a class that is not there": ("trainer:\n  callbacks:\n    - class_path: no.such.Class\n", "no.such.Class"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, run, tmp_path):
    content, words = CONFIGS[name]
    path = tmp_path / "the config ü.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in run("-c", path)


def test_a_missing_argument_is_named_without_the_whole_config(run, tmp_path):
    data = {"class_path": "datamodules.PG19DataModule", "init_args": {"path": "books"}}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"data": data}))
    message = run("-c", tmp_path / "data.yaml", "--data.tokenizer", "null")
    assert "the following arguments are required: tokenizer" in message
    assert "Namespace" not in message


def test_configs_that_cannot_be_read(run, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "none.yaml", tmp_path / "loop", "/proc/self/mem"):
        assert str(path) in run("-c", path)


OPTIONS = {
    "trainer.min_steps": ["2:3:4"],
    "trainer.max_steps": ["-2:30", "-5"],
    "trainer.devices": ["0", "100000"],
    "trainer.accumulate_grad_batches": ["0"],
    "trainer.val_check_interval": ["0"],
    "trainer.gradient_clip_val": ["-1"],
    "trainer.limit_train_batches": ["0"],
    "model.context_length": ["112", "1e30", "0"],
    "model.stride": ["0", "-4"],
    "model.window_fraction": [".nan", "0"],
    "model.objective": ["torch.nn.Linear", "{no: [mapping"],
    "model.objective.gamma": ["1e999", "0.5"],
    "model.lora": [
        "{target_modules: 3}",
        '{target_modules: "("}',
        "{target_modules: [nosuch]}",
        "{target_modules: [q_proj], bias: nosuch}",
        "{target_modules: [q_proj], lora_alpha: .nan}",
        "{rank: 3}",
    ],
    "model.model_config": ["{1: 2}", "{hiden_size: 3}", "{rope_parameters: 3}"],
    "model.context_extension": [
        "{method: [1], original_length: 8, target_length: 16}",
        "{method: pi, original_length: 64, target_length: 32}",
        "{method: pi, original_length: 64}",
        "{method: pi, original_length: 64, target_length: 1}",
    ],
    "model.attn_implementation": ["nosuch"],
    "data.num_workers": ["1000000"],
    "data.long_documents": ["{longer_than: 9, weight: 1e12}"],
    "data.packing": ["worst"],
}
"""Values that an option refuses; the message has the option's name."""

VALUES = [
    ("model.lora", "{target_modules: [q_proj], r: 0}", "`r`"),
    ("model.model_config", "{rope_parameters: {rope_type: nosuch}}", "'nosuch'"),
    ("model.model_config", "{rope_parameters: {rope_type: linear, factor: 0.5}}", "got 0.5"),
    ("model.model_config", "{rope_parameters: {rope_type: linear}}", "got None"),
    ("model.model_config", "{rope_parameters: {rope_theta: 0}}", "got 0"),
    ("model.model_config", "{num_hidden_layers: 0}", "`num_hidden_layers`"),
    ("model.model_config", "{num_hidden_layers: x}", "num_hidden_layers"),
    ("model.model_config", "{vocab_size: 10}", "do not match its config"),
    ("model.context_extension", "{method: dynamic_ntk, original_length: 64, target_length: 128}", "dynamic"),
    ("model.pretrained_model_name_or_path", "", "No model at ''"),
    ("model.pretrained_model_name_or_path", "./nowhere", "./nowhere"),
    ("model.pretrained_model_name_or_path", "https://x/y", "No server answers"),
    ("data.tokenizer", "no/tokenizer/here", "no/tokenizer/here"),
    ("data.train", "/nowhere/*.jsonl", "No file at"),
    ("data.text_field", "body", "no text field 'body'"),
    ("data.cache_dir", "/proc/longce", "LONGCE_CACHE"),
    ("nosuch", "1", "unknown option `--nosuch`"),
    ("ckpt_path", "/dev/zero", "/dev/zero"),
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


@pytest.mark.parametrize("value", ["deepspeed", "deepspeed_stage_3_offload", DEEPSPEED, f"{{class_path: {DEEPSPEED}}}"])
def test_deepspeed_is_refused_and_its_package_is_not_asked_for(value, run, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", False)
    message = run(f"--trainer.strategy={value}")
    assert "DeepSpeed ZeRO is not supported. Use FSDP2: add `-c configs/strategies/fsdp.yaml`" in message


def test_a_strategy_derived_from_that_of_deepspeed(run, tmp_path):
    code = "from lightning.pytorch.strategies import DeepSpeedStrategy\nclass Divided(DeepSpeedStrategy): ..."
    (tmp_path / "own_strategy.py").write_text(code)
    assert "DeepSpeed ZeRO is not supported" in run("--trainer.strategy={class_path: own_strategy.Divided}")


LINES = {
    "torn": ('{"text": "a', "malformed JSON"),
    "array": ("[1]", "expected a JSON object, got list"),
    "null": ('{"text": null}', "must be a string, got NoneType"),
    "nested": ('{"text": {"text": "a"}}', "must be a string, got dict"),
    "nan": ('{"text": NaN}', "must be a string, got float"),
    "key": ('{"txt": "a"}', "no text field 'text'"),
    "surrogate": ('{"text": "a\\ud800"}', "a lone surrogate"),
    "brackets": ("[" * 100_000, "Python cannot parse this JSON"),
    "digits": ('{"text": "a", "n": ' + "9" * 5000 + "}", "Python cannot parse this JSON"),
    "nul": ("\0", "malformed JSON"),
}


@pytest.mark.parametrize("name", LINES)
def test_json_lines(name, run, tmp_path):
    line, words = LINES[name]
    path = tmp_path / "with\nnewline ü.jsonl"
    path.write_text(f"{DOCUMENT}\n{line}\n")
    message = run("--data.train", path)
    assert words in message
    assert f"{path.name}:2" in message


@pytest.mark.slow
def test_packed_files(run, tmp_path):
    torn = zstandard.compress(DOCUMENT.encode() * 999)[:-5]
    cases = {"t.jsonl.zst": (torn, "is damaged"), "n.jsonl.gz": (DOCUMENT.encode(), "is damaged")}
    cases |= {"e.jsonl": (b"", "No document in"), "u.jsonl": (DOCUMENT.encode("utf-16"), "is not UTF-8")}
    cases |= {"h.jsonl": (b'{"text": " "}\n' * 5, "All of the 5 documents are empty")}
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        message = run("--data.train", tmp_path / name)
        assert words in message
        assert name in message


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
    "slow tokenizer": (
        with_a_slow_tokenizer,
        "(CTRLTokenizer) does not report the characters",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights, neither"),
    "torn": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "incomplete or damaged"),
    "a layer missing": (without_a_layer, "lack 9 tensors"),
    "a file missing": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "lacks b.safetensors",
    ),
    "weights of another name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
        "has no weights, neither",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "its folder has no tokenizer files, such as"),
    "torn tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"version": '), "The tokenizer '"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "model_type"),
    "torn config": (lambda folder: (folder / "config.json").write_text('{"model_type": "lla'), "not a valid JSON"),
}
CHANGES = [
    ({"quantization_config": {"quant_method": "nosuch"}}, "quantized by 'nosuch'"),
    ({"quantization_config": {}}, "quantized by None"),
    ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}, "'nosuch', which transformers does not support"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": -2.0, "rope_theta": 1e4}}, "a number of 1 or more, got -2.0"),
    ({"num_hidden_layers": -1}, "must be 1 or more, got -1"),
    ({"num_hidden_layers": "two"}, "num_hidden_layers"),
    ({"model_type": "nosuch"}, "nosuch"),
    ({"model_type": "t5"}, "not causal LMs"),
    ({"hidden_act": "nosuch"}, "could not be loaded"),
    ({"vocab_size": 10}, "10 tokens"),
]


def scored(place, model, evaluator, capsys, *options):
    words = ["score", place / "0.txt", "--model", model, "--evaluator", evaluator]
    return refused(*words, "--context_length", "32", "--stride", "16", *options, capsys=capsys)


@pytest.mark.parametrize("name", MODELS)
def test_model_folders(name, place, model_dir, evaluator_dir, tmp_path, capsys):
    damage, words = MODELS[name]
    folder = edited(model_dir, tmp_path / "model")
    damage(folder)
    assert words in scored(place, folder, evaluator_dir, capsys)
    assert words in scored(place, evaluator_dir, folder, capsys)


def test_a_file_for_a_model(place, model_dir, evaluator_dir, capsys):
    file = model_dir / "model.safetensors"
    assert f"is a file: use its folder '{model_dir}'" in scored(place, file, evaluator_dir, capsys)
    assert f"is a file: use its folder '{model_dir}'" in scored(place, evaluator_dir, file, capsys)


def test_an_index_may_name_pickled_weights(model_dir, tmp_path):
    folder = edited(model_dir, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model-1.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model-1.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weight_files(str(folder))
    load_backbone(ModelConfig(str(folder)))


@pytest.mark.parametrize(("changes", "words"), CHANGES, ids=str)
def test_model_configs(changes, words, place, model_dir, evaluator_dir, tmp_path, capsys):
    message = scored(place, edited(model_dir, tmp_path / "model", **changes), evaluator_dir, capsys)
    assert words in message
    assert len(message) < 3000


SCORE = [
    ("--context_length", "0", "`context_length`"),
    ("--stride", "-5", "`stride`"),
    ("--alpha", "1e999", "`alpha`"),
    ("--beta", "5", "`beta`"),
    ("--max_tokens", "0", "`max_tokens`"),
    ("--device", "cuda:9", "not available"),
    ("--output", "/proc/x.json", "Cannot write to the folder /proc"),
    ("--cache_dir", "/proc/x", "LONGCE_CACHE"),
    ("--attn_implementation", "nosuch", "nosuch"),
]


@pytest.mark.parametrize(("option", "value", "words"), SCORE)
def test_score_options(option, value, words, place, model_dir, evaluator_dir, capsys):
    words_, message = words, scored(place, model_dir, evaluator_dir, capsys, option, value)
    assert words_ in message


def test_score_files(model_dir, tmp_path, capsys):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "utf16").write_bytes("text".encode("utf-16"))
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    names = ["loop", "dangling", "empty", "utf16", "binary", "none", ".", "n\0l", "x" * 5000]
    for file in [*(tmp_path / name for name in names), "/dev/zero", "/proc/self/mem", ""]:
        message = refused("score", file, "--model", model_dir, "--evaluator", model_dir, capsys=capsys)
        assert Path(file).name.replace("\0", r"\x00")[:200] in message
        assert len(message) < 1000


@pytest.mark.parametrize("command", ["score", "inspect"])
def test_files_of_records_are_not_scored_as_text(command, place, model_dir, capsys):
    words = [command, place / "good.jsonl", "--evaluator", model_dir, "--model", model_dir]
    assert "good.jsonl' contains records, not one text" in refused(*words, capsys=capsys)


def test_files_that_are_scored_twice(place, model_dir, evaluator_dir, tmp_path, capsys, caplog):
    (tmp_path / "link.txt").symlink_to(place / "0.txt")
    for again in (place / "0.txt", tmp_path / "link.txt"):
        words = ["score", place / "0.txt", again, "--model", model_dir, "--evaluator", evaluator_dir]
        assert f"'{again}' is given twice" in refused(*words, capsys=capsys)
    shutil.copy(place / "0.txt", tmp_path / "copy.txt")
    options = ["--model", model_dir, "--evaluator", evaluator_dir, "--context_length", "32", "--stride", "16"]
    main([*map(str, ["score", place / "0.txt", tmp_path / "copy.txt", *options])])
    assert "copy.txt' has the same text as" in caplog.text


def test_pipes_that_end_early(run, model_dir, capsys):
    for content, words in ((b"model: {stri", "expected ',' or '}'"), (b"", "Unexpected config")):
        reader, writer = os.pipe()
        os.write(writer, content)
        os.close(writer)
        assert words in run("-c", f"/dev/fd/{reader}")
        options = ["--model", model_dir, "--evaluator", model_dir]
        assert f"No file '/dev/fd/{reader}'" in refused("score", f"/dev/fd/{reader}", *options, capsys=capsys)
        os.close(reader)


def test_another_tokenizer_with_fewer_tokens(place, tmp_path, evaluator_dir, monkeypatch):
    """No token is out of range, and none means what it did."""
    words = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    words += ["--data.tokenizer", evaluator_dir, "--trainer.default_root_dir", tmp_path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce", *map(str, words)])
    with pytest.warns(UserWarning, match=r"of the 340 tokens of .* differ from those of the model"):
        main([*map(str, words)])


@pytest.mark.slow
def test_adapters_of_another_config(run, place, tmp_path, monkeypatch):
    fit = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    fit += ["--model.lora", "{target_modules: [q_proj], r: 4, lora_alpha: 8}", "--trainer.default_root_dir", tmp_path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce", *map(str, fit)])
    main([*map(str, fit)])
    path = next(tmp_path.rglob("step-1.ckpt"))
    for lora, words in {
        "{target_modules: [q_proj], r: 8, lora_alpha: 8}": "is (4, 32) in it and (8, 32) in this run",
        "{target_modules: [q_proj], r: 4, lora_alpha: 16}": "`lora.lora_alpha` = 8, and this run has 16",
        "{target_modules: [k_proj], r: 4, lora_alpha: 8}": "set `lora` as in the run that wrote it",
    }.items():
        assert words in run("--ckpt_path", path, "--model.lora", lora)


@pytest.mark.slow
def test_checkpoints(run, tmp_path, place, model_dir, monkeypatch):
    config = yaml.safe_load((place / "experiment.yaml").read_text())
    fit = ["fit", "-c", BASE, "-c", place / "experiment.yaml", "--trainer.limit_val_batches", "0"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["longce", *map(str, fit)])
    main([*map(str, fit), "--trainer.default_root_dir", str(tmp_path)])
    good = torch.load(next(tmp_path.rglob("step-1.ckpt")), weights_only=True)
    cases = {
        "a list": ([1, 2], "was not written by `longce fit`"),
        "a number": (3, "was not written by `longce fit`"),
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
    assert config["model"]["pretrained_model_name_or_path"] == str(model_dir)


@pytest.mark.slow
def test_other_commands(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in refused("export", "none.ckpt", "out", capsys=capsys)
    (tmp_path / "int.ckpt").write_bytes(b"")
    assert "is truncated" in refused("export", "int.ckpt", "out", capsys=capsys)
    plan = {
        "known cards": ["--gpu", "nosuch"],
        "must be 1 or more": ["--gpu", "H200", "--model.model_config", "{num_hidden_layers: 0}"],
        "v>0": ["--gpu", "H200", "--gpus", "0"],
    }
    for words, options in plan.items():
        assert words in run(*options, name="plan")
    assert "/nowhere" in run("--evaluator", "/nowhere", name="influence")
