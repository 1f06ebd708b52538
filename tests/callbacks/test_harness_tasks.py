import json
import random

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from callbacks import LongContextTasks
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.config import ModelConfig
from lightning_modules.models.loading import load_backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.objectives import CrossEntropy
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.harness.evaluation import evaluate_task
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.tasks import load_tasks
from tests.conftest import make_text
from tests.support.harness_tasks import write_tasks
from tests.support.toy_tasks import GUESS


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def _datasets_elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def make_trainer(callback, tmp_path, **settings):
    return Trainer(
        accelerator="cpu",
        logger=CSVLogger(tmp_path / str(len(list(tmp_path.iterdir())))),
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        **settings,
    )


@pytest.fixture
def rows(tokenizer):
    documents = [encode_document(make_text(30, seed=seed), tokenizer, name=f"{seed}") for seed in range(4)]
    return DataLoader(documents, batch_size=None)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_logged_values_match_the_tasks(model_dir, task_dir, tmp_path, rows, stage):
    tasks = ["both", "rolling", GUESS]
    callback = LongContextTasks(tasks, [48], include_path=str(task_dir), limit=4, log_samples=True)
    trainer = make_trainer(callback, tmp_path)
    (logged,) = getattr(trainer, stage)(LongContextLM(str(model_dir)), rows, verbose=False)
    model = HarnessModel(
        load_backbone(ModelConfig(str(model_dir))), load_tokenizer(str(model_dir)), TaskConfig(limit=4)
    )
    tasks = load_tasks(["both", "rolling"], include_path=str(task_dir)).tasks
    expected = {name: evaluate_task(model, name, task)["metrics"] for name, task in tasks.items()}
    assert logged["harness/choice/acc_norm"] == pytest.approx(expected["choice"]["acc_norm,none"])
    assert logged["harness/rolling/bits_per_byte"] == pytest.approx(expected["rolling"]["bits_per_byte,none"], rel=1e-5)
    mean = (expected["choice"]["acc,none"] + expected["letter"]["acc,none"]) / 2
    assert logged["harness/both/acc"] == pytest.approx(mean)
    (samples,) = tmp_path.rglob("harness/step-0/letter.jsonl")
    lines = samples.read_text().splitlines()
    assert len(lines) == 4
    assert 0 <= logged["tasks/guess/48"] <= 100, "our own tasks, by the same callback"
    assert json.loads(lines[0])["arguments"]


@pytest.mark.filterwarnings("ignore:The model has dropout")  # to see that the random states are kept
def test_training_does_not_change(model_dir, task_dir, tmp_path, rows, monkeypatch):
    steps = []
    monkeypatch.setattr(
        LongContextTasks,
        "_run_tasks",
        lambda self, trainer, module, ask=LongContextTasks._run_tasks: (
            steps.append(trainer.global_step) or ask(self, trainer, module)
        ),
    )

    def train(callbacks):
        torch.manual_seed(0)
        random.seed(5)
        module = LongContextLM(str(model_dir), CrossEntropy(), model_config={"attention_dropout": 0.5}, dtype="float64")
        callback = callbacks or LongContextTasks(["letter"], include_path=str(task_dir), every_n_steps=100)
        trainer = make_trainer(callback, tmp_path, max_steps=4, accumulate_grad_batches=2, max_epochs=2)
        trainer.fit(module, rows)
        return module, trainer, (random.random(), float(torch.rand(())))

    asked = LongContextTasks(["letter"], include_path=str(task_dir), every_n_steps=2, limit=2)
    with_tasks, trainer, states = train(asked)
    assert steps == [2, 4]
    assert with_tasks.backbone.training
    logged = trainer.logger.experiment.metrics_keys
    assert {"harness/letter/acc", "harness/seconds"} <= set(logged)
    without, _, expected = train(None)
    assert steps == [2, 4]
    assert states == expected
    for one, other in zip(with_tasks.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_missing_data_is_refused_before_the_model_is_loaded(model_dir, task_dir, tmp_path, rows, monkeypatch):
    away = LongContextTasks(["away"], include_path=str(task_dir))
    monkeypatch.setattr(LongContextLM, "configure_model", None)
    with pytest.raises(ValueError, match="'away'"):
        make_trainer(away, tmp_path).validate(LongContextLM(str(model_dir)), rows)
