import math
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_modules.training.monitoring.progress as progress
from datamodules import RecallDataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.training.monitoring.progress import StepProgress
from tests.support.bars import Bar, replace_bars
from tests.support.tiny_training import TINY
from tests.support.trainers import quiet_trainer


@pytest.fixture
def bars(monkeypatch):
    return replace_bars(monkeypatch, progress)


def fit(root, checkpoint=None, **options):
    trainer = quiet_trainer(root, StepProgress(), num_sanity_val_steps=0, enable_progress_bar=True, **options)
    torch.manual_seed(0)
    documents = {"train_documents": 12, "validation_documents": 3, "test_documents": 3}
    data = RecallDataModule(sequence_length=64, cache_dir=str(root / "cache"), **documents)
    trainer.fit(LongContextLM(model_config=TINY, context_length=16, stride=16), data, ckpt_path=checkpoint)
    return trainer


LINE = r"step {}  {}%  loss [\d.]+  perplexity [\d.]+  [\d.]+k? tok/s"


def test_steps_are_those_of_the_optimizer_with_accumulation_and_after_a_resume(bars, tmp_path):
    fit(tmp_path, max_steps=2, accumulate_grad_batches=4).save_checkpoint(tmp_path / "two.ckpt")
    steps, *evaluations = bars
    assert steps.seen == [1, 2, "closed"]
    assert steps.lines[0] == "step 0/2  0%"
    assert re.fullmatch(r"step 1/2  50%  loss [\d.]+  [\d.]+k? tok/s  \d+ s left", steps.lines[1])
    assert all((bar.total, bar.seen) == (3, [1, 2, 3, "closed"]) for bar in evaluations)
    bars.clear()
    resumed = fit(tmp_path, tmp_path / "two.ckpt", max_steps=5, accumulate_grad_batches=2, val_check_interval=2)
    assert resumed.callback_metrics["train/tokens"] == (2 * 4 + 3 * 2) * 64
    assert bars[0].seen == [3, 4, 5, "closed"]
    assert bars[0].lines[0] == "step 2/5  40%"
    assert any(re.fullmatch(LINE.format("4/5", 80) + r"  \d+ s left", line) for line in bars[0].lines)
    assert re.fullmatch(LINE.format("5/5", 100), bars[0].lines[-1])


@pytest.mark.parametrize(
    ("names", "monitor", "expected"),
    [
        (["val/perplexity", "val/longppl"], "step", "LongPPL 1"),
        (["val/perplexity"], None, "perplexity 0"),
        (["val/a/perplexity", "val/a/x/longppl", "val/b/x/longppl"], None, "LongPPL 1 (a/x)"),
        (["val/a/x/longppl", "val/b/x/longppl_soft"], "val/b/x/longppl_soft", "longppl_soft 1 (b/x)"),
        (["train/loss"], "train/loss", ""),
    ],
)
def test_one_of_several_evaluations_is_shown(names, monitor, expected):
    values = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    trainer = SimpleNamespace(callback_metrics=values, checkpoint_callbacks=[ModelCheckpoint(monitor=monitor)])
    assert progress._describe_evaluation(trainer) == expected


def test_the_time_left_is_estimated_from_the_steps_of_this_process(bars, monkeypatch):
    trainer = Trainer(max_steps=70, logger=False, enable_progress_bar=False, enable_model_summary=False)
    monkeypatch.setattr(Trainer, "global_step", 62)
    bar = StepProgress()
    bar._steps, bar._first = Bar("", unit="step"), (60, 100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 120.0)
    bar._describe_step(trainer)
    assert bar._steps.lines == ["step 62/70  89%  80 s left"]


def test_epochs_and_predictions_are_counted(bars, tmp_path):
    trainer = fit(tmp_path, max_epochs=2, accumulate_grad_batches=5, limit_val_batches=0)  # the last step has two
    (steps,) = bars
    assert steps.seen == [1, 2, 3, 4, 5, 6, "closed"]
    assert steps.lines[-1].startswith("step 6/6  100%")
    bars.clear()
    trainer.predict(trainer.lightning_module, trainer.datamodule, return_predictions=False)
    (bar,) = bars
    assert (bar.name, bar.total, bar.seen) == ("prediction", 3, [1, 2, 3, "closed"])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (11000, "3.1 h"), (360000, "4.2 days")],
)
def test_the_time_left_has_a_fitting_unit(seconds, expected):
    assert progress._describe_rest(seconds) == f"{expected} left"


def test_each_cell_has_an_aligned_line_and_the_step_shows_one_with_key_tokens():
    values = {"val/a/judge/loose/longppl": 5.0, "val/a/judge/loose/key_tokens": 1240.0, "val/a/perplexity": 20.0}
    values |= {"val/bb/judge/loose/longppl": math.nan, "val/bb/judge/loose/key_tokens": 0.0, "val/bb/perplexity": 9.0}
    values |= {"val/a/judge/loose/longppl_soft": 7.0, "test/a/longppl": 1.0}
    metrics = {name: torch.tensor(value) for name, value in values.items()}
    assert progress.describe_cells(metrics, "val") == [
        "val/a/judge/loose   LongPPL     5  over 1,240 key tokens  perplexity 20",
        "val/bb/judge/loose  no key tokens",
    ]
    monitor = ModelCheckpoint(monitor="val/bb/judge/loose/longppl")
    trainer = SimpleNamespace(callback_metrics=metrics, checkpoint_callbacks=[monitor])
    assert progress._describe_evaluation(trainer) == "LongPPL 5 (a/judge/loose)"
