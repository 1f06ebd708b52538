"""The files of docs/customize.md, run as a reader would: through the command line, on top of an experiment."""

import re
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from longce.cli.lightning_cli import LongceCLI
from longce.cli.main import main
from tests.support.pages import ROOT, blocks, stand_in
from tests.support.readers import EXPERIMENT, LONGER_THAN_THE_MODEL

PAGE = ROOT / "docs" / "customize.md"
FILES = {re.match(r"# (\w+\.py)\n", block)[1]: block for block in blocks(PAGE, "python")}
COMMANDS = {re.search(r"my_\w+", line)[0]: line for line in blocks(PAGE, "bash")[0].splitlines()}
SMALL = {  # instead of what the page has for models and texts of real size
    "'books/*.txt'": "pg19/train/0.txt",
    "meta-llama/Llama-2-7b-hf": "model",
    "--model.layers 4": "--model.layers 1",
    "16384": "64",
    "..": "configs/base.yaml -c experiment.yaml",
}
pytestmark = [LONGER_THAN_THE_MODEL, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


@pytest.fixture
def run(reader, monkeypatch):
    for name, code in FILES.items():
        (reader / name).write_text(code)
    trainer = {**EXPERIMENT["trainer"], "callbacks": EXPERIMENT["trainer"]["callbacks"][:1]}
    (reader / "experiment.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "trainer": trainer}))
    monkeypatch.setattr(sys, "argv", ["longce"])

    def fit(name, *options):
        """Run the command of a file, and return what it logged."""
        main(["fit", *stand_in(COMMANDS[name], SMALL).split()[2:], *options])
        (folder,) = (reader / "runs/longce").iterdir()
        events = EventAccumulator(str(folder)).Reload()
        return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}

    return fit


def test_objective(run):
    logged = run("my_objective")
    assert logged["train/weight_mean"] == pytest.approx(1 + logged["train/weight_above_1"])  # weights of 1 and 2 only
    assert 0 < logged["train/weight_above_1"] < 1


@pytest.mark.slow
def test_data_of_hugging_face_are_trained_on(run, reader):
    logged = run("my_data", "--data.tokens", "64", "--model.objective", "CrossEntropy")
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokens = tokenizer((reader / "pg19/train/0.txt").read_text(), return_tensors="pt", truncation=True, max_length=64)
    loss = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)(**tokens, labels=tokens.input_ids).loss
    assert logged["train/loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(("name", "sharded"), [("my_data", True), ("my_objective", False)])
def test_lightning_shards_only_data_that_does_not_shard_itself(name, sharded, run, monkeypatch):
    seen = []
    monkeypatch.setattr(LongceCLI, "fit", lambda self, **_: seen.append(self.trainer._accelerator_connector))
    run(name)
    assert seen[0].use_distributed_sampler is sharded


@pytest.mark.slow
def test_module_is_trained_resumed_exported_and_scored(run, reader, capsys):
    run("my_module", "--model.optimizer.lr", "0.01", "--trainer.logger.init_args.version", "one")
    run("my_module", "--trainer.max_steps", "2", "--ckpt_path", "last", "--trainer.logger.init_args.version", "one")
    saved = yaml.safe_load((reader / "runs/longce/one/config.yaml").read_text())["model"]
    assert saved["class_path"] == "my_module.TopLayers"
    assert (saved["init_args"]["layers"], saved["init_args"]["context_length"]) == (1, 32)
    config = ["-c", "runs/longce/one/config.yaml"]
    for command in (["plan", *config, "--gpu", "H200"], ["data", "inspect", *config], ["validate", *config]):
        main(command)
    main(["export", "runs/longce/one/checkpoints/last.ckpt", "exported"])
    before, after = (load_file(f"{folder}/model.safetensors") for folder in ("model", "exported"))
    changed = {name.split(".")[2] for name in after if name in before and not torch.equal(before[name], after[name])}
    assert changed == {"1"}  # the last of two layers
    capsys.readouterr()
    words = "report1.txt --model exported --evaluator evaluator --context_length 32 --stride 16 --alpha 0.5 --beta -6"
    main(["score", *words.split()])
    assert re.search(r"corpus of 1 +[\d,]+ +[\d,]+ +[\d.,]+", capsys.readouterr().out)


PLAIN = """
import torch
from lightning.pytorch import LightningModule
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone

class Plain(LightningModule):
    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def configure_model(self):
        self.backbone = load_backbone(ModelConfig(self.path)).train()

    def training_step(self, batch, batch_idx):
        return -self.backbone(batch).mean()

    def validation_step(self, batch, batch_idx):
        return {"log_likelihood": self.backbone(batch)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.slow
def test_any_other_module_is_trained_and_evaluated(run, reader):
    (reader / "plain.py").write_text(PLAIN)
    (evaluator,) = (one for one in EXPERIMENT["trainer"]["callbacks"] if "External" in one["class_path"])
    mine = {"model": {"class_path": "plain.Plain", "init_args": {"path": "model"}}}
    (reader / "mine.yaml").write_text(yaml.safe_dump({**mine, "trainer": {"callbacks": [evaluator]}}))
    logged = run("my_metric", "-c", "mine.yaml", "--trainer.callbacks+", "my_metric.LatePerplexity")
    assert logged["val/longppl"] > 1
    assert not [tag for tag in logged if tag.startswith("train/")]
    with pytest.raises(SystemExit):
        run("my_metric", "-c", "mine.yaml", "--trainer.callbacks+", "callbacks.HuggingFaceExport")


def test_metric(run):
    logged = run("my_metric", "--trainer.callbacks.position", "1")
    assert logged["val/late_perplexity"] == pytest.approx(logged["val/perplexity"])  # all tokens but the first


@pytest.mark.slow
def test_optimizer_and_schedule(run, reader):
    (reader / "mine.yaml").write_text(blocks(PAGE, "yaml")[0])
    options = ["-c", "mine.yaml", "--trainer.max_steps", "40", "--trainer.limit_val_batches", "0"]
    options += [
        "--trainer.callbacks+",
        "lightning.pytorch.callbacks.LearningRateMonitor",
        "--model.lr_scheduler.warmup_steps",
        "2",
    ]
    logged = run("my_objective", *options, "--trainer.max_steps", "4")
    assert logged["lr-AdamW/weights"] == pytest.approx(1e-5)  # half of the peak, in the middle of the decay
    assert logged["lr-AdamW/embed_tokens|lm_head"] == pytest.approx(0.5e-5)
