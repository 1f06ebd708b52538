"""`longce fit` and its kin as a user runs them, the shipped configs, and what bad input says."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules.influence.store import InfluenceStore
from datamodules.influence.writer import InfluenceWriter
from datamodules.recall import recall_tokenizer
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import short_context
from lightning_modules.models.tokenization.tokenizer import load_tokenizer, tokenizer_hash
from longce.cli.lightning_cli import LongceCLI
from tests.support import forks
from tests.support.commands import longce, refused
from tests.support.experiments import book_data, evaluator
from tests.support.experiments import experiment as make_experiment
from tests.support.runs import TIMES
from tests.support.texts import write_books

CONFIGS = Path(__file__).parent.parent / "configs"
BASE, DEBUG = str(CONFIGS / "base.yaml"), str(CONFIGS / "debug.yaml")
PG19 = str(CONFIGS / "experiments/longce_pg19.yaml")
LAYERS = ("experiments", "strategies", "evaluation", "quickstart")
EXPERIMENTS = sorted(path for folder in LAYERS for path in (CONFIGS / folder).glob("*.yaml"))


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """A folder of its own for each test."""
    monkeypatch.chdir(tmp_path)


def write_experiment(path, books, model_dir, evaluator_dir):
    """Write a small, complete experiment on the base config, and return its path as a word."""
    trainer = {"max_steps": 4, "val_check_interval": 2, "callbacks+": [evaluator(evaluator_dir)]}
    path.write_text(yaml.safe_dump(make_experiment(model_dir, book_data(model_dir, books), lr=0.01, **trainer)))
    return str(path)


@pytest.fixture
def books(tmp_path, corpus):
    write_books(tmp_path / "pg19", train=corpus[:4], validation=corpus[4:6], test=corpus[6:7])
    return tmp_path / "pg19"


@pytest.fixture
def experiment(tmp_path, books, model_dir, evaluator_dir):
    return write_experiment(tmp_path / "experiment.yaml", books, model_dir, evaluator_dir)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, model_dir, evaluator_dir):
    """An experiment and the folder of its training of four steps, for all tests that need one."""
    folder = tmp_path_factory.mktemp("trained")
    write_books(folder / "pg19", train=corpus[:4], validation=corpus[4:6], test=corpus[6:7])
    experiment = write_experiment(folder / "experiment.yaml", folder / "pg19", model_dir, evaluator_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGCE_CACHE", str(folder / "cache"))
        longce("fit", "-c", BASE, "-c", experiment, folder=folder)
    (log_dir,) = (folder / "runs" / "longce").iterdir()
    return experiment, log_dir


@pytest.mark.slow
def test_fit_trains_evaluates_logs_and_its_saved_config_gives_equal_losses(trained, tmp_path):
    _, first = trained
    longce("fit", "-c", str(first / "config.yaml"))
    (second,) = (tmp_path / "runs" / "longce").iterdir()
    curves = []
    for log_dir in (first, second):
        events = EventAccumulator(str(log_dir)).Reload()
        curves.append({tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert set(curves[0]) >= {
        "train/loss",
        "train/perplexity",
        "train/weight_mean",
        "train/weight_above_1",
        "train/weight_at_cap",
        "train/tokens_per_second",
        "val/longppl",
        "val/longppl_soft",
        "val/perplexity",
        "val/key_tokens",
        "val/key_token_share",
    }
    assert "hp_metric" not in curves[0]
    assert len(curves[0]["train/loss"]) == 4
    assert len(curves[0]["val/longppl"]) == 3  # before training, and after two and four steps
    for tag in set(curves[0]) - TIMES:
        assert curves[0][tag] == curves[1][tag], tag
    assert (second / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_a_saved_config_with_the_default_optimizer_can_be_read_again(experiment, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    config = yaml.safe_load(Path(experiment).read_text())
    del config["model"]["optimizer"]
    Path(experiment).write_text(yaml.safe_dump(config))
    longce("fit", "-c", BASE, "-c", experiment)
    (saved,) = (tmp_path / "runs").rglob("config.yaml")
    assert f"The run is in {saved.parent.relative_to(tmp_path)}." in caplog.messages[-1]
    assert yaml.safe_load(saved.read_text())["model"]["optimizer"]["init_args"]["betas"] == [0.9, 0.95]
    checkpoint = str(next(tmp_path.glob("runs/longce/*/checkpoints/last.ckpt")))
    longce("validate", "-c", str(saved), "--ckpt_path", checkpoint)
    assert "val/longppl" in capsys.readouterr().out


def kill_in_the_fourth_row(words):
    """Run a command that SIGKILL ends when it has written three rows of weights and half of another."""
    original = InfluenceWriter.write

    def write(self, *arguments):
        original(self, *arguments)
        if len(self.rows) - len(self.remaining()) == 3:
            with (self.folder / "influence.bin").open("r+b") as file:
                file.seek(int(self.rows.row(3)[0, 0]) * 2)
                file.write(b"half a row")
            os.kill(os.getpid(), signal.SIGKILL)

    InfluenceWriter.write = write
    longce(*words)


@pytest.mark.slow
def test_stored_influence_survives_a_kill_and_trains_like_longce_without_short_passes(
    experiment, model_dir, tmp_path, monkeypatch, capsys
):
    configs = ["-c", BASE, "-c", experiment]
    command = ["influence", *configs, "--evaluator", str(model_dir), "--output", str(tmp_path / "weights")]
    killed = forks.start(kill_in_the_fourth_row, command, out=tmp_path / "printed")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    stored = ["--data.influence", str(tmp_path / "weights"), "--model.objective", "StoredInfluence"]
    fit = ["fit", *configs, "--trainer.limit_val_batches", "0"]
    assert "incomplete: run the same" in refused(*fit, *stored)

    computed, write = [], InfluenceWriter.write
    monkeypatch.setattr(InfluenceWriter, "write", lambda self, n, w: computed.extend(n) or write(self, n, w))
    longce(*command)
    printed = capsys.readouterr().out
    count = int(re.search(r"Token weights of (\d+) sequences of 128 tokens", printed)[1])
    assert sorted(computed) == list(range(count))[-len(computed) :]
    assert len(computed) == count - 3
    advice = printed.split("Train with: ")[1].split()
    assert advice == [*stored, "--model.objective.gamma", "5"]

    losses = []
    short_pass = short_context.short_log_likelihood
    for name, options in (("online", []), ("stored", advice)):
        passes = []
        monkeypatch.setattr(
            short_context, "short_log_likelihood", lambda *a, p=passes, **k: p.append(1) or short_pass(*a, **k)
        )
        (tmp_path / name).mkdir()
        longce(*fit, *options, folder=tmp_path / name)
        assert len(passes) == (4 if name == "online" else 0)
        events = EventAccumulator(str(next((tmp_path / name / "runs").rglob("config.yaml")).parent))
        events.Reload()
        losses.append([events.Scalars(f"train/{key}")[0].value for key in ("loss", "weight_mean", "weight_at_cap")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][2] > 0


@pytest.mark.slow
def test_influence_takes_a_saved_config_and_its_folder(trained, evaluator_dir, tmp_path):
    saved = str(trained[1] / "config.yaml")
    longce("influence", "-c", saved, "--evaluator", str(evaluator_dir), "--data.influence", "weights")
    assert InfluenceStore(tmp_path / "weights").header["made_from"]["sequence_length"] == 128
    assert not list(tmp_path.rglob("config.yaml")), "no logs of a run that trains nothing"


@pytest.mark.slow
def test_validate_test_and_predict(trained, tmp_path, capsys):
    experiment, log_dir = trained
    checkpoint = log_dir / "checkpoints" / "last.ckpt"
    (tmp_path / "single.yaml").write_text("trainer: {callbacks: {class_path: callbacks.StepCheckpoint}}")
    single = ["validate", "-c", BASE, "-c", experiment, "-c", "single.yaml"]
    longce(*single)  # not in a list, which Lightning accepts
    for command, key in (("validate", "val/longppl"), ("test", "test/longppl")):
        arguments = [command, "-c", BASE, "-c", experiment, "--ckpt_path", str(checkpoint)]
        longce(*arguments)
        assert key in capsys.readouterr().out
    writer = tmp_path / "writer.yaml"
    callbacks = [{"class_path": "callbacks.TokenScoresWriter", "init_args": {"output_dir": "scores"}}]
    writer.write_text(yaml.safe_dump({"trainer": {"callbacks+": callbacks}}))
    longce("predict", "-c", BASE, "-c", experiment, "-c", str(writer))
    assert len(list((tmp_path / "scores").glob("*.safetensors"))) == 1


SCORER = "lightning_modules.scoring.long_context_scorer.load_scorer"


def test_a_corpus_without_text_is_refused_before_the_model_is_loaded(books, model_dir, tmp_path, monkeypatch):
    def load(*_, **__):
        raise ValueError("the model is loaded")

    monkeypatch.setattr(SCORER, load)
    (tmp_path / "lines.jsonl").write_text('{"id": 1, "body": "some text"}\n')
    for files, message in {str(books): "the model is loaded", "lines.jsonl": "found ['body', 'id']."}.items():
        options = ("--model", str(model_dir), "--output", "scores", "--context_length", "32", "--stride", "16")
        assert message in refused("corpus", "score", files, *options, "--device", "cpu")


def test_ctrl_c_while_a_corpus_is_scored_is_reported_in_one_line(books, model_dir, monkeypatch, capsys):
    def load(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(SCORER, load)
    with pytest.raises(SystemExit) as stopped:
        longce("corpus", "score", str(books), "--model", str(model_dir), "--output", "scores", "--device", "cpu")
    assert stopped.value.code == 130
    assert "longce: interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_corpus_is_scored_and_chosen_from(books, model_dir, tmp_path, monkeypatch, capsys):
    scoring = ["corpus", "score", f"{books}/*/*.txt", "--model", str(model_dir), "--output", "scores"]
    scoring += ["--context_length", "32", "--stride", "16", "--dtype", "float32", "--contexts", "32", "64"]
    scoring += ["--device", "cpu"]
    longce(*scoring)
    assert json.loads((tmp_path / "scores" / "_SUCCESS.json").read_text())["documents"] == 7
    choice = ("--by", "folder", "--output", "ids.txt", "--figure", "figure.svg", "--rank_by", "key_token_ratio")
    longce("corpus", "select", "scores", "--where", "tokens > 100", *choice)
    assert "7 documents with" in capsys.readouterr().out
    assert len((tmp_path / "ids.txt").read_text().split()) == 7
    for option in ("weights", "mixture", "page"):
        assert option in refused("corpus", "select", "scores", f"--{option}", "file")
    said = refused(*scoring, "--stride", "8")
    assert "`stride` was 16 and is 8" in said
    (books / "test" / "7.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as stopped:
        longce(*scoring)
    assert stopped.value.code == 1, "the command was right, and a document was not"
    assert "test: 1 of 2 documents failed (50.0%)" in capsys.readouterr().err
    assert not (tmp_path / "scores" / "_SUCCESS.json").exists()


@pytest.mark.slow
def test_the_command_line_wins_over_a_checkpoint(trained, monkeypatch):
    experiment, log_dir = trained
    checkpoint = log_dir / "checkpoints" / "last.ckpt"
    arguments = ["fit", "-c", BASE, "-c", experiment, "--ckpt_path", str(checkpoint), "--model.stride", "8"]
    monkeypatch.setattr(sys, "argv", ["longce", *arguments, "--trainer.max_steps", "5"])
    cli = LongceCLI()
    assert cli.model.short_context.stride == 8
    assert cli.trainer.global_step == 5


def test_data_inspect_shows_the_rows_of_fit_and_loads_no_model(experiment, monkeypatch, capsys):
    monkeypatch.setattr(LongContextLM, "save_hyperparameters", lambda *_, **__: 1 / 0)
    settings = ["data", "inspect", "-c", BASE, "-c", experiment, "--trainer.accelerator", "gpu"]
    options = ["--data.packing", "best_fit", "--rows", "1", "0", "--width", "40", "--names", "true"]
    longce(*settings, *options)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("sequence ")] == ["1", "0"]
    assert "document 0 (0 Book 0), tokens 0 to 128 of" in lines[-2]
    for option, value in (("rows", "9999"), ("width", "0")):
        assert option.rpartition(".")[2].rstrip("s") in refused(*settings, f"--{option}", value)
    assert "`longce data inspect`" in refused("data", "show")
    assert "set `data` to a module that has them" in refused("data", "inspect", "-c", BASE)


@pytest.mark.slow
@pytest.mark.parametrize("config", EXPERIMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_config_runs_under_the_debug_overlay(config, tmp_path):
    below = ["-c", PG19] if config.stem in ("curriculum", "pose") else []  # name no data module
    longce("fit", "-c", BASE, *below, "-c", str(config), "-c", DEBUG)
    (saved,) = (tmp_path / "runs").rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["max_steps"] == 2
    events = EventAccumulator(str(saved.parent))
    events.Reload()
    assert len(events.Scalars("lr-AdamW")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variables", "logged"),
    [
        ("wandb", {"WANDB_MODE": "offline"}, "runs/wandb/offline-run-*/run-*.wandb"),
        (
            "mlflow",
            {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
            "mlruns/*/*/metrics/train/loss",
        ),
    ],
)
def test_the_loggers_of_others_log_without_a_network(name, variables, logged, tmp_path):
    """In a process of its own, because these packages read their variables when they are imported.

    It must not use the wandb service of another test in this process, which works in another folder.
    """
    pytest.importorskip(name)
    words = ["fit", "-c", BASE, "-c", str(CONFIGS / "loggers" / f"{name}.yaml"), "-c", DEBUG]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_SERVICE")}
    subprocess.run([sys.executable, "-m", "longce", *words], env=environment | variables, check=True)
    (file,) = tmp_path.glob(logged)
    assert file.stat().st_size > 0
    if name == "mlflow":
        assert len(file.read_text().splitlines()) == 2
    assert len(list(tmp_path.glob("runs/longce/version_0/events.out.tfevents.*"))) == 1


@pytest.mark.slow
def test_export_where_the_data_module_makes_its_own_tokenizer(tmp_path):
    longce("fit", "-c", BASE, "-c", DEBUG)
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    longce("export", str(checkpoint), str(tmp_path / "out"))
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer_hash(tokenizer) == tokenizer_hash(recall_tokenizer())
    assert tokenizer.eos_token is None
    assert tokenizer.bos_token == "<bos>"


@pytest.mark.slow
def test_going_on_with_the_newest_whole_checkpoint_of_a_folder(experiment, tmp_path, caplog):
    fit = ["fit", "-c", BASE, "-c", experiment, "--trainer.limit_val_batches", "0"]
    message = refused(*fit, "--ckpt_path", "last")
    assert "the logger makes a new folder at each start" in message
    assert "--trainer.logger.init_args.version NAME" in message
    named = [*fit, "--trainer.logger.init_args.version", "mine", "--ckpt_path", "last"]
    longce(*named, "--trainer.max_steps", "2")
    folder = tmp_path / "runs" / "longce" / "mine" / "checkpoints"
    longce(*named, "--trainer.max_steps", "3")
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 3
    (folder / "step-3.ckpt").write_bytes((folder / "step-3.ckpt").read_bytes()[:-100])
    with caplog.at_level("INFO"):
        longce("validate", "-c", BASE, "-c", experiment, "--ckpt_path", str(folder.parent))
    assert re.search(r"Skipping .*step-3.ckpt: it is truncated", caplog.text)
    assert re.search(r"Weights of .*step-2.ckpt", caplog.text)
    message = refused(*fit, "--ckpt_path", str(folder / "step-3.ckpt"))
    assert "is truncated" in message
    assert message.count("step-2.ckpt") == 1
    assert "no checkpoint was found" in refused(*fit, "--ckpt_path", str(tmp_path / "runs"))
    own = ["--trainer.callbacks+", "{class_path: callbacks.StepCheckpoint, init_args: {dirpath: /proc/longce}}"]
    assert "Cannot write to the folder /proc" in refused(*fit, *own)


def test_nan_loss_stops_with_its_step(experiment):
    diverging = ["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "1e30"]
    message = refused("fit", "-c", BASE, "-c", experiment, *diverging, "--trainer.gradient_clip_val", "null")
    assert "The loss is nan at step" in message
    assert "batch" in message
