"""Runs of cross entropy and of LongCE, compared by their folders and by `longce score` of their exported models."""

import re

import pytest
import yaml

from longce.cli.main import main
from longce.compare.command import compare
from tests.conftest import make_text

LENGTHS = {"context_length": 32, "stride": 16}
KEY_TOKENS = {**LENGTHS, "alpha": 0.2, "beta": -7.0}
SIZES = (70, 90, 80, 60, 75, 85)  # words of each validation document


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The '.*' does not have many workers")
def test_ratios_of_runs_are_those_of_longce_score(model_dir, evaluator_dir, tmp_path, capsys):
    for name, sizes in (("train", (200, 150)), ("books", SIZES)):
        (tmp_path / name).mkdir()
        for number, size in enumerate(sizes):
            (tmp_path / name / f"{number}.txt").write_text(make_text(size, seed=size))
    files, options = sorted(map(str, (tmp_path / "books").iterdir())), {"evaluator": str(evaluator_dir), **KEY_TOKENS}
    logger = {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": str(tmp_path), "name": "runs"},
    }
    books = {"files": f"{tmp_path}/books/*.txt", "length": "whole"}
    data = {
        "tokenizer": str(model_dir),
        "train": f"{tmp_path}/train",
        "sequence_length": 64,
        "validation_sets": {"books": books},
    }
    trainer = {
        "accelerator": "cpu",
        "max_steps": 3,
        "val_check_interval": 3,
        "enable_progress_bar": False,
        "log_every_n_steps": 1,
    }
    callbacks = [
        {"class_path": "callbacks.ExternalEvaluator", "init_args": {**options, "add_special_tokens": False}},
        {"class_path": "callbacks.StepCheckpoint", "init_args": {"save_last": True}},
    ]
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}
    config = {
        "seed_everything": 0,
        "model": {"pretrained_model_name_or_path": str(model_dir), "optimizer": optimizer, **LENGTHS},
        "data": {"class_path": "datamodules.TextDataModule", "init_args": data},
        "trainer": {**trainer, "logger": logger, "callbacks": callbacks},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    for objective in ("CrossEntropy", "LongCE"):
        run, model = tmp_path / "runs" / objective, str(tmp_path / "models" / objective)
        version = ["--trainer.logger.init_args.version", objective]
        main(["fit", "-c", str(tmp_path / "config.yaml"), "--model.objective", objective, *version])
        main(["export", str(run / "checkpoints" / "last.ckpt"), model])
        given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        output = str(tmp_path / f"{objective}.parquet")
        main(["score", *files, "--model", model, *given, "--evaluator_add_special_tokens", "false", "--output", output])
    capsys.readouterr()

    def find_numbers(paths):
        table = compare(paths).partition("Final numbers")[2].partition("Cost")[0]
        lines = [line for line in table.splitlines() if "alpha 0.2, beta -7" in line or line[:1] == " "]
        return [re.findall(r"\d+\.\d+", line.partition("-7")[2] or line) for line in lines]

    of_runs = find_numbers([tmp_path / "runs" / name for name in ("CrossEntropy", "LongCE")])
    assert of_runs == find_numbers([tmp_path / f"{name}.parquet" for name in ("CrossEntropy", "LongCE")])
    # LongPPL, soft LongPPL and perplexity; of LongCE also two ratios with their intervals.
    assert sorted(map(len, of_runs)) == [3, 9]
    assert "model.objective" in compare(
        [tmp_path / "runs" / name for name in ("CrossEntropy", "LongCE")], tmp_path / "page.html"
    )
