"""The recipes of docs/trainers.md: pages show or name all recipes, and each file trains a tiny model with LongCE."""

import importlib
import json
import runpy
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import longce
from tests.conftest import make_text
from tests.lightning_modules.integrations.conftest import TEMPLATE
from tests.support.longce_sums import count_scored, longce_sum, text
from tests.support.pages import ROOT, blocks, stand_in
from tests.support.recipes import FOLDER

RECIPES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
QUIET = "use_cpu=True, report_to=[], disable_tqdm=True, save_steps=1,"
SMALL = {
    "HuggingFaceTB/SmolLM2-1.7B": "model",
    "Qwen/Qwen3-1.7B": "model",
    "Qwen/Qwen3-8B": "model",
    "2048": "8",
    "4096": "8",
    "512": "4",
    "1024)": "4)",
    "8192": "60",
    "max_steps=200": "max_steps=2",
    "eval_steps=50": "eval_steps=1",
    '"runs/trainer",': f'"runs/trainer", {QUIET}',
    '"runs/trl",': f'"runs/trl", {QUIET} max_steps=1, gradient_checkpointing=False,',
    'precision="bf16-mixed"': 'precision="bf16-mixed", accelerator="cpu", enable_model_summary=False, logger=False',
    'evaluator="model"': 'evaluator="model", context_length=16, stride=8, alpha=0.5, beta=-6.0',
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`logger=.*|.*logging_steps.*|.*checkpoint.*"),
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_shows_the_file_or_leads_to_it(name):
    pages = [ROOT / "docs" / "trainers.md", ROOT / "docs" / "curate.md"]
    shown = any(RECIPES[name] in blocks(page, "py") for page in pages)
    assert shown or any(f"(recipes/{name}.py)" in page.read_text() for page in pages)


@pytest.fixture
def folder(tmp_path, model_dir, monkeypatch):
    """The folder of a reader: a model, books and chats."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path / "model")
    for name, count in (("books", 10), ("validation", 2)):
        (tmp_path / name).mkdir()
        for seed in range(count):
            (tmp_path / name / f"{seed}.txt").write_text(make_text(60, seed))
    roles = zip(("user", "assistant"), (make_text(30, 1), make_text(20, 2)), strict=True)
    chat = {"messages": [{"role": role, "content": content} for role, content in roles]}
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for _ in range(8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name, folder):
    """Run a recipe with small stand-ins, and return the weights that it has changed."""
    (folder / f"{name}.py").write_text(stand_in(RECIPES[name], SMALL))
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    return AutoModelForCausalLM.from_pretrained(folder / "trained")


def expected_loss(folder, texts):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
    with torch.no_grad():
        return float(sum(longce_sum(model, *one) for one in texts) / count_scored(texts))


def book(folder, number):
    ids = AutoTokenizer.from_pretrained(folder / "model")((folder / f"books/{number}.txt").read_text())["input_ids"]
    ids = torch.tensor(ids[:60])
    return ids, ids


def first_log(folder, run_name):
    (path, *_) = sorted(folder.glob(f"runs/{run_name}/checkpoint-*/trainer_state.json"))
    return json.loads(path.read_text())["log_history"]


@pytest.mark.slow
def test_hf_trainer(folder):
    changed = run("hf_trainer", folder)
    log = first_log(folder, "trainer")
    assert any("eval_longppl" in entry for entry in log)
    assert {**changed.config.to_dict()}["architectures"] == ["LlamaForCausalLM"]
    losses = [expected_loss(folder, [book(folder, number)]) for number in range(10)]
    assert min(losses) * 0.98 < log[0]["loss"] < max(losses) * 1.02


@pytest.mark.slow
def test_trl_sft(folder):
    pytest.importorskip("trl")
    run("trl_sft", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chat = json.loads((folder / "chats.jsonl").read_text().splitlines()[0])["messages"]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids = torch.tensor(encoded["input_ids"])
    labels = ids.where(torch.tensor(encoded["assistant_masks"]).bool(), -100)
    assert 0 < count_scored([(ids, labels)]) < len(ids) / 2
    assert first_log(folder, "trl")[0]["loss"] == pytest.approx(expected_loss(folder, [(ids, labels)]), rel=0.01)


@pytest.mark.slow
def test_plain_pytorch(folder, capsys):
    run("plain_pytorch", folder)
    name, loss = capsys.readouterr().out.split()[:2]
    assert name == "0.txt"
    assert float(loss) == pytest.approx(expected_loss(folder, [book(folder, 0)]), rel=0.01)


@pytest.mark.slow
def test_lightning_module(folder):
    changed = run("lightning_module", folder)
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not torch.equal(changed.lm_head.weight, start.lm_head.weight)
    module = runpy.run_path(str(folder / "lightning_module.py"))["MyModule"]("model")
    ids, labels = book(folder, 0)
    loss = module.model(input_ids=ids[None], labels=labels[None]).loss
    assert loss.item() == pytest.approx(expected_loss(folder, [(ids, labels)]), rel=1e-6)


# Of `BasePlugin` in axolotl 0.19.0, with their arguments.
AXOLOTL = {
    "register": ["cfg"],
    "get_input_args": [],
    "pre_model_load": ["cfg"],
    "post_model_build": ["cfg", "model"],
    "pre_lora_load": ["cfg", "model"],
    "post_lora_load": ["cfg", "model"],
    "post_model_load": ["cfg", "model"],
    "post_trainer_create": ["cfg", "trainer"],
}


@pytest.fixture
def axolotl(monkeypatch):
    """Stand-in for the part of Axolotl that the plugin uses."""
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    methods = {name: lambda self, *_: None for name in AXOLOTL}
    sys.modules[names[-1]].BasePlugin = type("BasePlugin", (), methods)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("axolotl_plugin", None)


def test_axolotl_plugin(axolotl, model_dir):
    plugin = importlib.import_module("axolotl_plugin").LongCEPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    settings = getattr(importlib.import_module(module), name)(longce_context_length=8, longce_stride=4)
    cfg = SimpleNamespace(**settings.model_dump())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    for hook in ("register", "pre_model_load", "post_model_build", "post_lora_load", "post_model_load"):
        getattr(plugin, hook)(*[{"cfg": cfg, "model": model}[name] for name in AXOLOTL[hook]])
    # Axolotl's packed rows number the documents in the mask.
    texts = [text(30, seed=1, vocabulary=390), text(25, seed=2, prompt=9, vocabulary=390)]
    packed = {
        "input_ids": torch.cat([ids for ids, _ in texts])[None],
        "labels": torch.cat([labels for _, labels in texts])[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in texts])[None],
        "attention_mask": torch.cat([torch.full_like(ids, number) for number, (ids, _) in enumerate(texts, 1)])[None],
    }
    loss = model.train()(**packed).loss
    expected = sum(longce_sum(plain, *one) for one in texts) / count_scored(texts)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    longce.remove_longce(model)
