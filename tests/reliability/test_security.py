"""Files of strangers run no code: each payload is shown to work where it is run on purpose."""

import ast
import io
import json
import os
import pickle
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from datamodules.influence.store import FORMAT, InfluenceStore
from datamodules.sources.documents import with_text
from datamodules.text import TextDataModule
from datamodules.token_store.store import TokenStore
from lightning_modules.export.card import model_card
from lightning_modules.export.checkpoint import export_checkpoint
from lightning_modules.export.options import ExportOptions
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.file_checks import check_weight_files
from lightning_modules.models.loading.load import load_backbone, load_config
from lightning_modules.models.tokenization.tokenizer import load_tokenizer
from lightning_modules.scoring.token_scores import TokenScores, read_key_spans
from lightning_modules.training.checkpoints.io import CheckedCheckpointIO, check_checkpoint
from lightning_modules.training.checkpoints.sharded import no_code
from lightning_modules.training.facts import TrainingFacts
from longce.cli.main import main
from tests.support.faults import Evil

ROOT = Path(__file__).parents[2]
OURS = [
    path for name in ("longce", "lightning_modules", "datamodules", "callbacks") for path in (ROOT / name).rglob("*.py")
]


class Attribute:
    """Unpickled, it is an attribute of an object. Python 3.11.2 pickles members of enums like this."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code was run"


def works(marker, run):
    """That the payload does its work when somebody lets it, so that its absence means something."""
    assert not marker.exists(), "code of a stranger was run"
    run()
    assert marker.exists(), "this payload would never have worked"


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_no_code_of_ours_evaluates_text_or_unpickles_files():
    assert len(OURS) > 80
    for path in OURS:
        for node, name, words in calls(ast.parse(path.read_text())):
            place = f"{path}:{node.lineno}: {name}"
            assert name not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load"), place
            assert not name.startswith(("marshal.", "shelve.", "dill.", "joblib.", "cloudpickle.")), place
            assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") or words.get("Loader"), place
            assert words.get("shell", "False") == "False", place
            assert words.get("trust_remote_code") != "True", place
            if name.endswith("torch.load"):
                assert words["weights_only"] in ("True", "weights_only is not False"), place
            if name == "pickle.loads":  # of what it has pickled itself, in memory
                assert ast.unparse(node.args[0]).startswith("pickle.dumps("), place


def test_key_spans_are_parsed(tmp_path, marker):
    text = f"__import__('os').mkdir({str(marker)!r})"
    for content in (text, f"[0, 1];{text}", f"[{text}, 1]", "[1, 0]", "[-1, 3]", "[" * 9999):
        (tmp_path / "spans.txt").write_text(content)
        with pytest.raises(ValueError, match=r"spans\.txt"):
            read_key_spans(tmp_path / "spans.txt")
    works(marker, lambda: eval(text))


@pytest.mark.parametrize("forced", [False, True])
def test_checkpoints(tmp_path, marker, monkeypatch, forced):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "extra": Evil(marker)}, path)
    for load in (
        lambda: CheckedCheckpointIO().load_checkpoint(path),
        lambda: CheckedCheckpointIO().load_checkpoint(path, weights_only=None),
        lambda: export_checkpoint(str(path), str(tmp_path / "out")),
    ):
        with pytest.raises(ValueError, match=r"x\.ckpt.* code") as refused:
            load()
        assert "weights_only" not in str(refused.value)
    works(marker, lambda: torch.load(path, weights_only=False))


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """A sharded checkpoint as one process writes it."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(folder, state):
        dcp.save(state, checkpoint_id=str(folder))
        torch.save({}, folder / "meta.pt")

    yield save
    dist.destroy_process_group()


def test_sharded_checkpoints(tmp_path, marker, sharded):
    state = {"w": torch.ones(3), "lr": 0.1, "nested": {"betas": (0.9, 0.95), "half": torch.ones(2).half()}}
    folder = tmp_path / "good"
    sharded(folder, state)
    check_checkpoint(folder)
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(index[: len(index) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        check_checkpoint(folder)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        check_checkpoint(folder)
    works(marker, lambda: _quietly(lambda: dcp.FileSystemReader(folder).read_metadata()))
    marker.rmdir()

    enum, member = _MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.name
    for owner, name, refused in ((enum, member, False), (enum, "__class__", True), (torch.Size, "__new__", True)):
        (folder / ".metadata").write_bytes(pickle.dumps(Attribute(owner, name)))
        with pytest.raises(ValueError, match=f"it refers to {name}") if refused else nullcontext():
            check_checkpoint(folder)

    (folder / ".metadata").write_bytes(index)
    torch.save({"loops": Evil(marker)}, folder / "meta.pt")
    with pytest.raises(ValueError, match="more than weights"):
        check_checkpoint(folder)
    works(marker, lambda: torch.load(folder / "meta.pt", weights_only=False))


def test_an_index_that_changes_what_an_enum_says_of_itself(tmp_path, sharded, monkeypatch):
    """The check would read a harmless member where torch's own loading reads the attribute, and so any code."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "_member_map_", dict(_MEM_FORMAT_ENCODING._member_map_))  # to set it back
    folder = tmp_path / "changed"
    sharded(folder, {"w": torch.ones(3)})

    def text(word):
        return b"X" + len(word).to_bytes(4, "little") + word.encode()

    new, members = text("__new__"), text("_member_map_")
    enum = f"c{_MEM_FORMAT_ENCODING.__module__}\n{_MEM_FORMAT_ENCODING.__name__}\nq\0".encode()
    change = b"N}" + members + b"}" + new + b"h\0ss\x86b0"  # setattr(enum, "_member_map_", {"__new__": enum})
    index = b"\x80\4" + enum + change + b"cbuiltins\ngetattr\nh\0" + new + b"\x86R."
    assert pickle.loads(index) == _MEM_FORMAT_ENCODING.__new__, "the attribute, not the member"
    (folder / ".metadata").write_bytes(index)
    with pytest.raises(ValueError, match="it refers to __new__"):
        check_checkpoint(folder)


def test_values_in_sharded_checkpoints(tmp_path, marker, sharded):
    folder = tmp_path / "values"
    sharded(folder, {"w": torch.ones(3), "lr": Evil(marker)})
    with pytest.raises(dcp.api.CheckpointException, match="Weights only load failed"), no_code():
        dcp.load({"w": torch.ones(3), "lr": 0}, checkpoint_id=str(folder))
    works(marker, lambda: _quietly(lambda: dcp.load({"w": torch.ones(3), "lr": 0}, checkpoint_id=str(folder))))


def _quietly(run):
    try:
        run()
    except Exception as error:  # what a payload leaves is of no use to whoever called it
        print(error)  # noqa: T201, for whoever looks why a payload no longer works


def test_rows_of_data_sets(tmp_path, marker, model_dir):
    pickled = pickle.dumps(Evil(marker))
    source = tmp_path / "corpus"
    (source / "sub").mkdir(parents=True)
    record = {"text": "ba ce", "name": f"../../{marker.name}", "__reduce__": ["os.mkdir", str(marker)]}
    (source / "a.jsonl").write_text(json.dumps(record) + "\n")
    documents = TextDataModule(str(model_dir), train=str(source / "a.jsonl"), name_field="name").source("train")
    assert [document.name for document in with_text(documents)] == [record["name"]]
    table = pyarrow.table({"text": ["ba ce"], "obj": [pickled]})
    pyarrow.parquet.write_table(table, source / "sub" / "b.parquet")
    files = TextDataModule(str(model_dir), train=str(source / "sub"), text_field="obj").source("train")
    with pytest.raises(ValueError, match="bytes"):
        list(files)
    works(marker, lambda: pickle.loads(pickled))


MODULE = """
import os
from transformers import {base}
os.mkdir({marker!r})
class Evil({base}):
    {body}
"""


def remote_code(folder, marker, base, body="model_type = 'llama'"):
    (folder / "evil.py").write_text(MODULE.format(base=base, marker=str(marker), body=body))


def test_model_and_tokenizer_folders(tmp_path, marker, model_dir, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    remote_code(folder, marker, "PreTrainedConfig")
    config = json.loads((folder / "config.json").read_text())
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil") | {"AutoTokenizer": 2 * ["evil.Evil"]}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto_map}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    evil = {"tokenizer_class": "Evil", "auto_map": auto_map, "chat_template": "{{ ''.__class__.__mro__ }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **evil}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))  # nobody is asked
    _quietly(lambda: load_tokenizer(str(folder)))
    for load in (load_config, load_backbone):
        _quietly(lambda load=load: load(ModelConfig(str(folder))))
    works(marker, lambda: _quietly(lambda: load_config(ModelConfig(str(folder), trust_remote_code=True))))


def test_pickled_weights_of_models_and_adapters(tmp_path, marker, model_dir, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "evil": Evil(marker)}, folder / "pytorch_model.bin")
    for forced in ("0", "1"):
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)
        with pytest.raises(ValueError, match=r"posix\.mkdir") as refused:
            load_backbone(ModelConfig(str(folder)))
        assert "weights_only" not in str(refused.value)
        with pytest.raises(ValueError, match="contains code"):
            check_weight_files(str(folder))  # before another model is loaded and scores
    works(marker, lambda: torch.load(folder / "pytorch_model.bin", weights_only=False))
    marker.rmdir()
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    lora = {"peft_type": "LORA", "base_model_name_or_path": str(model_dir), "target_modules": ["q_proj"], "r": 2}
    (adapters / "adapter_config.json").write_text(json.dumps(lora))
    shutil.copy(model_dir / "config.json", adapters)
    torch.save({"evil": Evil(marker)}, adapters / "adapter_model.bin")
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    _quietly(lambda: load_backbone(ModelConfig(str(adapters))))
    works(marker, lambda: torch.load(adapters / "adapter_model.bin", weights_only=False))


MKDIR = "{{class_path: os.mkdir, init_args: {{path: '{marker}'}}}}"
POPEN = "{{class_path: subprocess.Popen, init_args: {{args: [mkdir, '{marker}']}}}}"
CONFIGS = {
    "tag": "model: !!python/object/apply:os.mkdir ['{marker}']",
    "name": "model: {{dtype: !!python/name:os.mkdir }}",
    "callback": f"trainer: {{{{callbacks: [{MKDIR}]}}}}",
    "process": f"trainer: {{{{callbacks: [{POPEN}]}}}}",
    "data": f"data: {POPEN}",
    "objective": f"model: {{{{objective: {MKDIR}}}}}",
    "optimizer": f"model: {{{{optimizer: {POPEN}}}}}",
    "schedule": f"model: {{{{lr_scheduler: {POPEN}}}}}",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_name_classes_of_the_right_kind_only(name, tmp_path, marker, monkeypatch, capsys):
    (tmp_path / "evil.yaml").write_text(CONFIGS[name].format(marker=marker))
    words = ["fit", "-c", str(ROOT / "configs" / "base.yaml"), "-c", str(tmp_path / "evil.yaml")]
    monkeypatch.setattr(sys, "argv", ["longce", *words])
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err
    works(marker, lambda: os.mkdir(marker))


@pytest.mark.slow
def test_a_config_is_code_all_the_same(tmp_path, marker, monkeypatch):
    """Why only configs that one has read should be run.

    To name a class imports its module, which runs it. Functions of the system are refused, also where one would do.
    """
    (tmp_path / "evil_module.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    optimizer = json.dumps({"class_path": "os.mkdir", "init_args": {"path": str(marker)}})
    for options, runs in ((["--model.objective", "evil_module.Evil"], True), (["--model.optimizer", optimizer], False)):
        words = ["fit", *options]
        monkeypatch.setattr(sys, "argv", ["longce", *words])
        with pytest.raises(SystemExit):
            main(words)
        assert marker.exists() == runs
        if runs:
            marker.rmdir()


def test_stored_scores_and_tokens(tmp_path, marker, model_dir):
    pickled = pickle.dumps({"long": Evil(marker)})
    (tmp_path / "x.safetensors").write_bytes(pickled)
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        TokenScores.load(tmp_path / "x.safetensors")
    store = tmp_path / "store"
    store.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")
    manifest = {"bytes": {"../secret": 8}, "crc32": {"../secret": 0}, "dtype": "O"}
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest\.json"):
        TokenStore(store)
    works(marker, lambda: pickle.loads(pickled))


def test_stored_influence(tmp_path, marker):
    store, pickled = tmp_path / "store", pickle.dumps(Evil(marker))
    store.mkdir()
    (store / "done.bin").write_bytes(b"\1")
    good = {"format": FORMAT, "tokens": 4, "rows": 1, "made_from": {"gamma": 5.0}}
    for header in (
        pickled,
        b"[" * 100_000,
        *(json.dumps({**good, **change}).encode() for change in ({"tokens": "4"}, {"tokens": -1}, {"made_from": [1]})),
        *(
            json.dumps({**good, **change}).encode()
            for change in ({"made_from": {}}, {"made_from": None}, {"rows": "yes"})
        ),
    ):
        (store / "header.json").write_bytes(header)
        with pytest.raises(ValueError, match=r"header\.json' |influence\.bin' "):
            InfluenceStore(store)
    (store / "header.json").write_text(json.dumps({**good, "tokens": len(pickled) // 2}))
    (store / "influence.bin").write_bytes(pickled[: len(pickled) // 2 * 2])
    assert InfluenceStore(store).values.dtype == np.float16  # numbers, whatever stands there
    (store / "influence.bin").unlink()
    (store / "influence.bin").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="0 of"):
        InfluenceStore(store)
    works(marker, lambda: pickle.loads(pickled))


def test_model_cards_quote_what_they_are_told():
    """Of a checkpoint's hostile name neither the header nor the lines that load the model become anything else."""
    hostile = 'x"); import os; os.mkdir("y")\n---\n!!python/object/apply:os.mkdir [z]'
    facts = TrainingFacts(base_model=hostile, base_is_local=False, dataset=hostile)
    for adapters in ("merged", "kept"):
        card = model_card(facts, {"model_type": "llama", "dtype": "float32"}, ExportOptions(adapters))
        header = next(yaml.safe_load_all(card))
        assert header["base_model"] == hostile
        assert header["datasets"] == [hostile]
        code = ast.parse(card.split("```python\n")[1].split("```")[0])
        assert not [name for _, name, _ in calls(code) if name.startswith("os.")]
