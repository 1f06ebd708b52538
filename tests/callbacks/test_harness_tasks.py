import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from callbacks import LongContextTasks
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from lightning_modules.models.tokenization.tokenizer import encode_document, load_tokenizer
from lightning_modules.tasks.evaluation.config import TaskConfig
from lightning_modules.tasks.harness.evaluation import evaluate_tasks
from lightning_modules.tasks.harness.model import HarnessModel
from lightning_modules.tasks.harness.tasks import find_names, load_tasks
from tests.conftest import make_text
from tests.support.runs import make_trainer
from tests.support.toy_tasks import GUESS


@pytest.fixture
def rows(tokenizer):
    documents = [encode_document(make_text(30, seed=seed), tokenizer, name=f"{seed}") for seed in range(4)]
    return DataLoader(documents, batch_size=None)


def test_logged_values_match_the_tasks(model_dir, task_dir, tmp_path, rows):
    tasks = ["both", "rolling", GUESS]
    callback = LongContextTasks(tasks, [48], include_path=str(task_dir), limit=4)
    trainer = make_trainer(tmp_path, 1, "auto", callbacks=[callback], logger=CSVLogger(tmp_path / "logs"))
    (logged,) = trainer.validate(LongContextLM(str(model_dir)), rows, verbose=False)
    config = TaskConfig(limit=4)
    model = HarnessModel(load_backbone(ModelConfig(str(model_dir))), load_tokenizer(str(model_dir)), config)
    manager, names = find_names(["both", "rolling"], str(task_dir))
    expected = {}
    for name in names:
        expected |= evaluate_tasks(model, load_tasks(manager, name, config))["results"]
    assert logged["harness/choice/acc_norm"] == pytest.approx(expected["choice"]["acc_norm,none"])
    assert logged["harness/rolling/bits_per_byte"] == pytest.approx(expected["rolling"]["bits_per_byte,none"], rel=1e-5)
    mean = (expected["choice"]["acc,none"] + expected["letter"]["acc,none"]) / 2
    assert logged["harness/both/acc"] == pytest.approx(mean)
    assert 0 <= logged["tasks/guess/48"] <= 100, "our own tasks, by the same callback"


def test_missing_data_is_refused_before_the_model_is_loaded(model_dir, task_dir, tmp_path, rows, monkeypatch):
    away = LongContextTasks(["away"], include_path=str(task_dir))
    monkeypatch.setattr(LongContextLM, "configure_model", None)
    with pytest.raises(ValueError, match="'away'"):
        make_trainer(tmp_path, 1, "auto", callbacks=[away]).validate(LongContextLM(str(model_dir)), rows)
