"""Hyperparameters of a run in its loggers, and the HPARAMS tab of TensorBoard."""

import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.metadata import EXPERIMENT_TAG, SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.identity import model_identity
from lightning_modules.training.monitoring import identity
from lightning_modules.training.monitoring.identity import RunIdentity, git_commit
from tests.conftest import make_text
from tests.support.commands import longce
from tests.support.experiments import component, evaluator, experiment

BASE = Path(__file__).parents[4] / "configs" / "base.yaml"
IDENTITY = {"commit", "longce", "model", "data", "parameters", "trained_parameters", "tokens_per_step"}


@pytest.fixture
def repository(tmp_path):
    """A folder under version control, where runs are started."""
    for command in (["init", "-q"], ["config", "user.email", "a@b.c"], ["config", "user.name", "a"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    (tmp_path / "code.py").write_text("1")
    subprocess.run(["git", "-C", tmp_path, "add", "code.py"], check=True)
    subprocess.run(["git", "-C", tmp_path, "commit", "-qm", "first"], check=True)
    return tmp_path


@pytest.fixture
def fit(repository, model_dir, evaluator_dir, monkeypatch):
    """Run ``longce fit`` on a tiny model, with two validation sets."""
    (repository / "texts").mkdir()
    for seed in range(3):
        (repository / "texts" / f"{seed}.txt").write_text(make_text(200, seed=seed))
    lengths = {"context_length": 48, "stride": 16}
    sets = {name: {"files": "texts", "documents": number} for name, number in (("a", 1), ("b", 2))}
    data = {"tokenizer": str(model_dir), "train": "texts", "sequence_length": 128, "cache_dir": "cache"}
    callback = evaluator(evaluator_dir, alpha=0.2, beta=-7.0, **lengths)
    data = component("datamodules.TextDataModule", validation_sets=sets, **data)
    config = experiment(model_dir, data, val_check_interval=1, **{"callbacks+": [callback]})
    config["model"] |= lengths
    (repository / "run.yaml").write_text(yaml.safe_dump(config))

    def run(*options):
        monkeypatch.chdir(repository)
        longce("fit", "-c", BASE, "-c", "run.yaml", *options)

    return run


def test_a_commit_shows_changes_and_a_folder_without_one_has_none(repository, tmp_path_factory):
    commit = git_commit(repository)
    assert len(commit) == 40
    (repository / "code.py").write_text("2")
    assert git_commit(repository) == f"{commit}-dirty"
    assert git_commit(tmp_path_factory.mktemp("empty")) is None


def shown_rate(folder):
    """The learning rate in the run's row of the HPARAMS tab."""
    metadata = EventAccumulator(str(folder)).Reload().SummaryMetadata(SESSION_START_INFO_TAG)
    content = HParamsPluginData.FromString(metadata.plugin_data.content)
    return content.session_start_info.hparams["model.optimizer.init_args.lr"].number_value


@pytest.mark.slow
def test_tensorboard_shows_final_and_best_values_without_points_of_its_own(fit, repository):
    fit("--trainer.max_steps", "2", "--model.optimizer.lr", "20")  # which makes the model worse
    folder = repository / "runs" / "longce" / "version_0"
    stored = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert stored["model.objective.class_path"].endswith("LongCE")
    assert (stored["model.optimizer.init_args.lr"], stored["data.init_args.sequence_length"]) == (20, 128)
    assert {f"run.{name}" for name in IDENTITY} <= set(stored)
    assert stored["run.tokens_per_step"] == 128
    assert not any("logger" in name for name in stored)

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curves = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    cells = ["a/longppl", "b/longppl", "a/perplexity", "b/perplexity"]
    for cell in cells:
        final, best = curves[f"val/{cell}"], curves[f"best/{cell}"]
        assert [step for step, _ in best] == [step for step, _ in final]
        assert [value for _, value in best] == [min(v for _, v in final[: n + 1]) for n in range(len(final))]
    experiment, start = (
        HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)
        for tag in (EXPERIMENT_TAG, SESSION_START_INFO_TAG)
    )
    shown = {metric.name.tag for metric in experiment.experiment.metric_infos}
    assert shown == {f"{kind}/{cell}" for cell in cells for kind in ("val", "best")}
    assert start.session_start_info.hparams["model.objective.class_path"].string_value == "LongCE"
    assert sum(setting.differs for setting in experiment.experiment.hparam_infos) == 5

    # In its own folder, other settings train from now on: not if the start fails, and not while it has trained no step.
    resumed = ("--trainer.logger.init_args.version", "version_0", "--ckpt_path", "last", "--model.optimizer.lr", "0.5")
    with pytest.raises(SystemExit):
        fit(*resumed, "--trainer.max_steps", "3", "--data.train", "missing")
    assert shown_rate(folder) == 20
    fit(*resumed, "--trainer.max_steps", "3")
    assert shown_rate(folder) == 0.5
    after = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [(each.step, each.value) for each in after.Scalars("best/a/longppl")][:3] == curves["best/a/longppl"]

    fit("--trainer.max_steps", "4", "--ckpt_path", str(folder))
    events = EventAccumulator(str(folder.parent / "version_1")).Reload()
    assert EXPERIMENT_TAG in events.summary_metadata
    assert events.Scalars("best/a/longppl")[-1].value == curves["val/a/longppl"][0][1]


@pytest.mark.slow
def test_a_csv_file_keeps_the_steps_before_a_kill_when_the_run_resumes_in_its_folder(fit, repository):
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv", "version": "a"}}
    (repository / "csv.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger, "log_every_n_steps": 2}}))
    fit("-c", "csv.yaml", "--trainer.max_steps", "2")
    (file,) = Path("csv").rglob("metrics.csv")
    file.write_bytes(file.read_bytes() + b"1,2")  # the process was killed while it wrote
    fit("-c", "csv.yaml", "--trainer.max_steps", "3", "--ckpt_path", "last")
    table = pd.read_csv(file)
    assert table["best/a/longppl"].count() == 4, "on disk when an evaluation ends"
    assert table["train/tokens"].dropna().tolist() == [256, 384]  # the total after the last step is logged always
    assert table["val/a/longppl"].count() == 4


@pytest.mark.slow
def test_wandb_and_mlflow_get_the_same_and_a_resumed_run_may_change_settings(fit, repository, monkeypatch):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # or MLflow 3 wants a database
    logger = MLFlowLogger("tests", tracking_uri=f"file:{repository}/mlruns")
    loggers = [
        {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "csv", "version": "one"}},
        {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"save_dir": ".", "offline": True}},
        {
            "class_path": "lightning.pytorch.loggers.MLFlowLogger",
            "init_args": {"tracking_uri": f"file:{repository}/mlruns", "run_id": logger.run_id},
        },
    ]
    (repository / "loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    fit("-c", "loggers.yaml", "--trainer.max_steps", "1")
    config = dict(wandb.run.config)
    wandb.finish()
    (saved,) = Path("csv").rglob("hparams.yaml")
    values = yaml.safe_load(saved.read_text())
    loggers[0]["init_args"]["version"] = "two"
    (repository / "loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    fit("-c", "loggers.yaml", "--trainer.max_steps", "2", "--ckpt_path", str(saved.parent))
    wandb.finish()
    assert {f"run.{name}" for name in IDENTITY} <= set(values)
    assert config == values
    assert values["trainer.max_steps"] == 1
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {name: str(value)[:250] for name, value in config.items()}
    assert run.data.metrics["best/a/longppl"] <= run.data.metrics["val/a/longppl"] < math.inf


def test_a_local_model_is_known_by_its_files_and_one_of_the_hub_by_its_commit(model_dir, monkeypatch):
    assert identity.identify_model(ModelConfig(str(model_dir))) == model_identity(ModelConfig(str(model_dir)))
    assert identity.identify_model(ModelConfig(None)) is None
    asked = []
    monkeypatch.setattr(identity, "hub_commit", lambda *arguments, **options: asked.append(arguments) or "abc")
    assert identity.identify_model(ModelConfig("org/model", revision="v1")) == "abc"
    assert asked == [("org/model", "v1")]


def test_a_set_without_key_tokens_has_no_columns(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    values = {"val/books/longppl": 3.0, "val/books/perplexity": 9.0, "val/notes/longppl": float("nan")}
    metrics = {name: torch.tensor(value) for name, value in values.items()}
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=1))
    trainer = SimpleNamespace(sanity_checking=False, callback_metrics=metrics, loggers=[logger], fit_loop=loop)
    identity = RunIdentity()
    identity._values = {"model.objective": "LongCE"}
    identity.on_validation_end(trainer, None)
    metrics["val/books/longppl"] = torch.tensor(float("nan"))  # it diverges, but had a value
    identity.on_validation_end(trainer, None)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir).Reload()
    content = HParamsPluginData.FromString(events.SummaryMetadata(EXPERIMENT_TAG).plugin_data.content)
    shown = {metric.name.tag for metric in content.experiment.metric_infos}
    assert shown == {f"{kind}/books/{name}" for kind in ("val", "best") for name in ("longppl", "perplexity")}
    assert [each.value for each in events.Scalars("best/books/longppl")] == [3.0, 3.0]
    assert "best/notes/longppl" not in events.Tags()["scalars"]


def test_earlier_settings_leave_an_event_file_and_nothing_else(tmp_path):
    """Whatever follows a damaged event is kept as it is."""
    events = [Event(step=1, summary=Summary(value=[Summary.Value(tag=tag)])) for tag in ("a", EXPERIMENT_TAG, "b")]
    file = tmp_path / "events.out.tfevents.1"
    rest = b"half an event"
    with file.open("wb") as stream:
        for event in events:
            RecordWriter(stream).write(event.SerializeToString())
        stream.write(rest)
    before = file.read_bytes()
    identity._remove_events(file, ["other"])
    assert file.read_bytes() == before
    identity._remove_events(file, [EXPERIMENT_TAG])
    kept = [Event.FromString(content).summary.value[0].tag for content in RawEventFileLoader(str(file)).Load()]
    assert kept == ["a", "b"]
    assert file.read_bytes().endswith(rest)
