import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks import HuggingFaceExport, huggingface_export
from lightning_modules.export.checkpoint import export_checkpoint
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from longce.cli.main import main
from tests.conftest import make_text, tiny_model
from tests.support.distributed import run_distributed
from tests.support.trainers import quiet_trainer

ROOT = Path(__file__).parents[2]


def make_trainer(callbacks, tmp_path, **settings):
    return quiet_trainer(tmp_path, *callbacks, max_steps=3, **settings)


@pytest.fixture
def documents(tokenizer):
    return [encode_document(make_text(90, seed), tokenizer, name=str(seed)) for seed in range(3)]


@pytest.fixture
def base(tmp_path, tokenizer):
    """Of four layers: EABF leaves the first two alone."""
    tiny_model("llama", len(tokenizer), seed=1, num_hidden_layers=4).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


class Documents(LightningDataModule):
    """As much of a data module as the export looks at."""

    def __init__(self, documents, tokenizer_name=None):
        super().__init__()
        self.documents = documents
        self.tokenizer_name, self.path, self.batch_size, self.sequence_length = tokenizer_name, "some/dataset", 1, 200
        self.tokenizer = None if tokenizer_name is None else AutoTokenizer.from_pretrained(tokenizer_name)

    def train_dataloader(self):
        return DataLoader(self.documents, batch_size=None)

    val_dataloader = test_dataloader = train_dataloader


EXTENSION = {"method": "eabf", "original_length": 64, "target_length": 512}
LORA = {"r": 2, "target_modules": "all-linear"}


def make_module(base, **settings):
    torch.manual_seed(0)
    settings = {"lora": LORA, "context_extension": EXTENSION, **settings}
    return LongContextLM(
        base, context_length=48, stride=16, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), **settings
    )


RELOAD = """
import re, sys
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
import os
root = Path(sys.argv[1])
ids, logits = torch.load(root / "ids.pt"), {}
try:
    AutoModelForCausalLM.from_pretrained(root / "merged")
except KeyError as error:
    assert "eabf" in str(error)
else:
    raise AssertionError("loaded without EABF")
for name in sys.argv[2:]:
    os.chdir(root / name)
    exec(re.search(r"```python\\n(.*?)```", Path("README.md").read_text(), re.DOTALL)[1])
    logits[name] = model(ids).logits.detach()
    assert tokenizer("ba ce").input_ids
# The trap: the adapter on the base model with its own config.
from peft import PeftModel
own = AutoModelForCausalLM.from_pretrained(root / "base")
logits["own config"] = PeftModel.from_pretrained(own, root / "kept")(ids).logits.detach()
torch.save(logits, root / "logits.pt")
"""


@pytest.mark.slow
def test_trained_with_lora_and_eabf_and_loaded_in_a_new_process(base, documents, tmp_path, capsys):
    """Merged and kept apart, by the callback and from the checkpoint: the lines of the card give the same logits."""
    module, data = make_module(base), Documents(documents, base)
    trainer = make_trainer(
        [HuggingFaceExport(str(tmp_path / name), adapters=name) for name in ("merged", "kept")], tmp_path
    )
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    ids = documents[0]["input_ids"][:, :200]
    assert ids.shape[1] == 200, "longer than the original length"
    torch.save(ids, tmp_path / "ids.pt")
    for name in ("merged", "kept"):
        main(["export", str(tmp_path / "last.ckpt"), str(tmp_path / f"{name} again"), "--adapters", name])
        assert str(tmp_path / f"{name} again") in capsys.readouterr().out
    names = ["merged", "kept", "merged again", "kept again"]
    subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path), *names], cwd=ROOT, check=True)

    module.eval()
    with torch.no_grad():
        expected = module.backbone.model(ids).logits
        with module.backbone.model.disable_adapter():
            assert (module.backbone.model(ids).logits - expected).abs().max() > 0.1, "it has learned something"
    logits = torch.load(tmp_path / "logits.pt")
    for name in names:
        torch.testing.assert_close(logits[name], expected, rtol=1e-4, atol=1e-4)
    assert (logits["own config"] - expected).abs().max() > 0.1
    for name in ("merged", "kept"):
        first, second = (json.loads((tmp_path / f / "longce_export.json").read_text()) for f in (name, f"{name} again"))
        assert first == second
        assert (tmp_path / name / "README.md").read_text() == (tmp_path / f"{name} again" / "README.md").read_text()
    assert first["training"]["tokens_per_step"] == 200
    assert first["training"]["dataset"] == "some/dataset"
    assert first["training"]["steps"] == first["training"]["metrics_step"] == 3
    assert first["training"]["metrics"]["val/perplexity"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 2, "target_modules": ["q_proj", "lm_head"]}])
def test_the_model_goes_on_unchanged_after_its_export(base, documents, tmp_path, lora):
    module, data = make_module(base, lora=lora), Documents(documents)
    plain, exporting = make_trainer([], tmp_path), make_trainer([HuggingFaceExport(str(tmp_path / "out"))], tmp_path)
    results = []
    for trainer in (plain, exporting):
        module = make_module(base, lora=lora)
        trainer.fit(module, data)
        results.append((trainer.test(module, data), trainer.validate(module, data), module.state_dict()))
    assert results[0][:2] == results[1][:2]
    assert results[0][2].keys() == results[1][2].keys()
    assert all(torch.equal(tensor, results[1][2][name]) for name, tensor in results[0][2].items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters["rope_type"] == "eabf"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adapters": "kept"}, "`adapters: kept`"),
        ({"push_to_hub": "org/name"}, "`push_to_hub`"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_before_training(base, documents, tmp_path, options, named):
    module = make_module(base, lora=None)
    trainer = make_trainer([HuggingFaceExport(str(tmp_path / "out"), **options)], tmp_path)
    with pytest.raises(ValueError, match=named):
        trainer.fit(module, Documents(documents))
    assert trainer.global_step == 0
    with pytest.raises(ValueError, match="FSDPStrategy"):
        HuggingFaceExport(str(tmp_path / "out")).on_fit_start(SimpleNamespace(strategy=FSDPStrategy()), module)


@pytest.mark.slow
def test_an_upload_that_fails_ends_neither_the_training_nor_the_export(base, documents, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("lightning_modules.export.upload.is_offline_mode", lambda: False)
    monkeypatch.setattr("lightning_modules.export.upload.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", fail)
    trainer = make_trainer([HuggingFaceExport(str(tmp_path / "out"), push_to_hub="org/name")], tmp_path)
    with pytest.warns(UserWarning, match="no route to the hub.* hf upload org/name"):
        trainer.fit(make_module(base, lora=None), Documents(documents))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def _train(rank, world_size, base, root, documents):
    os.environ["LOCAL_RANK"] = str(rank)
    written = []
    original = huggingface_export.export_model
    huggingface_export.export_model = lambda *a, **k: written.append(rank) or original(*a, **k)
    trainer = make_trainer([HuggingFaceExport(str(root / "out"))], root, strategy="ddp", devices=world_size)
    trainer.fit(make_module(base, context_extension=None), Documents(documents))
    assert written == ([0] if rank == 0 else [])
    assert (root / "out" / "model.safetensors").is_file(), "it is there when any process goes on"


@pytest.mark.slow
def test_a_tokenizer_is_exported_as_it_is_stored(base, documents, tmp_path):
    """With trimmed offsets, which loading makes whole: the rule of the authors goes by them."""
    path = Path(base) / "tokenizer.json"
    stored = json.loads(path.read_text())
    trimmed = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    stored["post_processor"] = {"type": "Sequence", "processors": [trimmed, stored["post_processor"]]}
    path.write_text(json.dumps(stored))
    data = Documents(documents, base)
    data.tokenizer = load_tokenizer(base)
    trainer = make_trainer([HuggingFaceExport(str(tmp_path / "callback"))], tmp_path)
    trainer.fit(make_module(base), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    export_checkpoint(str(tmp_path / "a.ckpt"), str(tmp_path / "command"))
    for name in ("callback", "command"):
        exported = json.loads((tmp_path / name / "tokenizer.json").read_text())
        assert exported["post_processor"] == stored["post_processor"]


@pytest.mark.slow
def test_two_processes_write_one_export(base, documents, tmp_path):
    run_distributed(_train, base, tmp_path, documents)
    facts = json.loads((tmp_path / "out" / "longce_export.json").read_text())["training"]
    assert facts["tokens_per_step"] == 400
    assert not list(tmp_path.glob(".building-*"))
