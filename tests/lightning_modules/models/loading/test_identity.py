import hashlib
import json
import os
import shutil

import pytest
from huggingface_hub.utils import filter_repo_objects

from lightning_modules.models.loading import identity as identity_of_models
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_config
from lightning_modules.scoring.config import EvaluatorConfig
from lightning_modules.scoring.scored_model import open_evaluator
from lightning_modules.training.facts import loading_facts
from lightning_modules.utilities import identity
from tests.conftest import make_text, tiny_model


def model_identity(name, revision=None, **settings):
    return identity_of_models.model_identity(ModelConfig(name, revision=revision, **settings))


@pytest.fixture
def model(tmp_path, model_dir):
    return shutil.copytree(model_dir, tmp_path / "model")


def edit(path, change):
    """Change a file in place and give it back its modification time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip_last_bit(content):
    content[-1] ^= 1


def test_identity_follows_what_is_loaded_and_not_the_path(model, model_dir):
    assert model_identity(str(model)) == model_identity(str(model_dir))
    seen = {model_identity(str(model))}
    (model / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(model_identity(str(model)))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    seen.add(model_identity(str(model)))
    for name in ("model.safetensors", "tokenizer.json"):
        edit(model / name, flip_last_bit)
        seen.add(model_identity(str(model)))
    assert len(seen) == 5


def test_files_that_are_not_loaded_do_not_count(model):
    first = model_identity(str(model))
    (model / "checkpoints").mkdir()
    for name in ("README.md", "train.log", "training_args.bin", "pytorch_model.bin", "checkpoints/last.ckpt"):
        (model / name).write_bytes(b"x")
    assert model_identity(str(model)) == first
    (model / "model.safetensors").unlink()  # now the other file would be loaded
    loaded = model_identity(str(model))
    (model / "pytorch_model.bin").write_bytes(b"y")
    assert len({first, loaded, model_identity(str(model))}) == 3


@pytest.mark.parametrize("name", ["model-1.safetensors", "pytorch_model-1.safetensors", "low/w.safetensors", "w.bin"])
def test_every_shard_of_an_index_counts_or_is_refused(model, name):
    (model / "low").mkdir()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match=name):  # it is missing
        model_identity(str(model))
    seen = set()
    for content in "ab":
        (model / name).write_text(content)
        if "/" in name or name.endswith(".bin"):
            with pytest.raises(ValueError, match=name):
                model_identity(str(model))
        else:
            seen.add(model_identity(str(model)))
    assert len(seen) in (0, 2)


def test_code_counts_where_it_runs(model):
    first = model_identity(str(model), trust_remote_code=True)
    assert first == model_identity(str(model))
    (model / "parts").mkdir()
    (model / "parts" / "modeling.py").write_text("x = 1")
    assert model_identity(str(model)) == first
    trusted = model_identity(str(model), trust_remote_code=True)
    (model / "parts" / "modeling.py").write_text("x = 2")
    assert len({first, trusted, model_identity(str(model), trust_remote_code=True)}) == 3


def test_an_evaluator_that_changes_before_it_is_loaded_is_refused(model, tmp_path):
    judge = open_evaluator(
        EvaluatorConfig(str(model), cache_dir=str(tmp_path / "scores"), context_length=32, stride=16)
    )
    tiny_model("llama", json.loads((model / "config.json").read_text())["vocab_size"], seed=9).save_pretrained(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model '.*' changed after the start of this run.*Start again"):
            judge.scores(make_text(60))
    assert not list((tmp_path / "scores").glob("*/*"))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, model_dir, monkeypatch):
    """The hub's cache on this machine with one model, as `huggingface_hub` lays it out; gives its snapshot."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in model_dir.iterdir():
        content = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        name = hashlib.sha256(content).hexdigest() if file.suffix == ".safetensors" else git
        (repository / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_hub_model_is_its_files_as_a_local_copy_of_them(hub, model_dir):
    assert type(load_config(ModelConfig("owner/tiny"))).__name__ == "LlamaConfig"  # transformers finds the same files
    assert model_identity("owner/tiny") == model_identity("owner/tiny", COMMIT) == model_identity(str(model_dir))
    (hub / "modeling.py").write_text("x = 1")
    assert model_identity("owner/tiny", trust_remote_code=True) != model_identity("owner/tiny")


def test_the_hub_is_asked_and_all_files_are_fetched_before_they_are_hashed(hub, monkeypatch):
    files = ["config.json", "model.safetensors", "additional_chat_templates/tool.jinja", "code/modeling.py"]
    left_out = [
        "consolidated.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
        "step-9/model.safetensors",
        "x.h5",
    ]
    fetched = set()

    def fetch(name, *, revision, allow_patterns, ignore_patterns=None, local_files_only=False):
        assert name == "owner/tiny"
        assert not local_files_only
        if allow_patterns == ["config.json"]:
            assert revision == "v2"
            return str(hub)
        assert revision == COMMIT
        found = filter_repo_objects([*files, *left_out], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.update(found)
        return str(hub)

    monkeypatch.setattr(identity_of_models, "is_offline_mode", lambda: False)
    monkeypatch.setattr(identity_of_models, "snapshot_download", fetch)
    model_identity("owner/tiny", "v2", trust_remote_code=True)
    assert fetched == set(files)
    (hub / "model.safetensors").unlink()
    model_identity("owner/tiny", "v2")
    assert fetched == {*files, "pytorch_model.bin"}


def test_a_commit_needs_neither_a_network_nor_a_cache(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(identity_of_models, "snapshot_download", refuse)
    assert identity_of_models.hub_commit("owner/absent", COMMIT) == COMMIT


def test_training_facts_name_the_commit(hub):
    config = ModelConfig("owner/tiny")
    facts = loading_facts(config, load_config(config))
    assert (facts["base_model"], facts["revision"]) == ("owner/tiny", COMMIT)


@pytest.mark.parametrize("attack", ["edit weights", "replace config", "add template", "other link"])
def test_an_edited_cache_of_the_hub_is_another_model(hub, attack):
    first = model_identity("owner/tiny")
    if attack == "add template":
        (hub / "chat_template.jinja").write_text("{{ messages }}")
    elif attack == "replace config":  # as editors do, which put a file in the place of the link
        config = (hub / "config.json").read_text()
        (hub / "config.json").unlink()
        (hub / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-02'))
    elif attack == "other link":  # to a blob of another commit, whose name is that of its content
        blob = hub.parents[1] / "blobs" / hashlib.sha256(b"other").hexdigest()
        blob.write_bytes(b"other")
        (hub / "model.safetensors").unlink()
        (hub / "model.safetensors").symlink_to(blob)
    else:
        edit((hub / "model.safetensors").resolve(), flip_last_bit)
    assert model_identity("owner/tiny") != first


def test_a_config_that_names_other_weights_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_weights": "low/w.safetensors"}))
    with pytest.raises(ValueError, match="transformers_weights"):
        load_config(ModelConfig(str(model)))


@pytest.mark.parametrize(("name", "revision"), [("owner/none", None), ("owner/tiny", "v2"), ("{}/config.json", None)])
def test_what_cannot_be_identified_is_refused(hub, model, name, revision):
    with pytest.raises(ValueError, match=r"cannot be identified: .*or give a local folder or another hub id"):
        model_identity(name.format(model), revision)


def test_a_second_look_reads_no_weights(model, monkeypatch):
    monkeypatch.setattr(identity, "SETTLING_TIME", 0)
    first = model_identity(str(model))
    monkeypatch.setattr(identity, "_hash_file", None)
    assert model_identity(str(model)) == first
