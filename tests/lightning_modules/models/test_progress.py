"""Forward passes advance a bar layer by layer."""

import logging

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from datamodules import RecallDataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import progress
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_frozen
from lightning_modules.models.progress import count_tokens, show_progress
from lightning_modules.scoring.evaluator import score_text
from lightning_modules.scoring.score import score
from lightning_modules.training.monitoring.progress import StepProgress
from tests.conftest import make_text
from tests.support.bars import replace_bars

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024}


@pytest.fixture
def bars(monkeypatch):
    return replace_bars(monkeypatch, progress)


def test_a_document_takes_the_tokens_of_its_long_pass_and_its_windows(bars, model_dir, tokenizer):
    backbone, text, sizes = load_frozen(ModelConfig(str(model_dir)), "cpu"), make_text(200, seed=1), (48, 16)
    length = len(score_text(text, backbone, tokenizer, context_length=48, stride=16).long)
    assert not bars  # nobody asked
    with show_progress([text], "evaluator", [7]) as documents:
        for each in documents:
            score_text(each, backbone, tokenizer, context_length=48, stride=16)
            bars[0].seen.append("scored")
    expected = count_tokens(length, context_length=sizes[0], stride=sizes[1])
    before = bars[0].seen[: bars[0].seen.index("scored")]
    assert before[-1] == pytest.approx(expected)
    layers = backbone.model.config.num_hidden_layers
    assert before[0] == pytest.approx((48 + 16) / layers)  # of a window, before its pass is over
    assert bars[0].seen[-2:] == [7, "closed"]  # the plan is what counts, also if scores were stored


def test_windows_by_hand():
    assert count_tokens(11, context_length=4, stride=3) == 11 + 7 + 5
    assert count_tokens(5, context_length=4, stride=3) == 5


def test_bars_are_closed_by_an_error(bars):
    def fail():
        with show_progress([1, 2], "model", [3, 4]) as documents:
            raise ValueError(next(documents))

    with pytest.raises(ValueError, match="1"):
        fail()
    assert bars[0].seen == ["closed"]
    assert progress._bar.get() is None


def test_score_names_the_document_and_gives_each_number_when_it_is_known(
    bars, model_dir, evaluator_dir, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("lightning_modules.scoring.score.SECONDS", 0.0)
    files = []
    for number in range(2):
        files.append(str(tmp_path / f"{number}.txt"))
        (tmp_path / f"{number}.txt").write_text(make_text(90, seed=number))
    result = score(files, str(model_dir), str(evaluator_dir), context_length=48, stride=16, alpha=0.3, beta=-7.0)
    assert [bar.lines for bar in bars] == [
        [f"{kind}, document 1 of 2", f"{kind}, document 2 of 2"] for kind in ("evaluator", "model")
    ]
    assert [bar.seen[-2] for bar in bars] == [bar.total for bar in bars]
    for row in result["documents"]:
        assert f"{row['file']}: {row['key_tokens']} key tokens, LongPPL {row['longppl']:.4f}" in caplog.text


def test_progress_does_not_change_numbers(model_dir, tokenizer):
    text, found = make_text(120, seed=2), []
    for shown in (False, True):
        backbone = load_frozen(ModelConfig(str(model_dir)), "cpu")
        if shown:
            with show_progress([text], "evaluator", [1]):
                found.append(score_text(text, backbone, tokenizer, context_length=48, stride=16).short)
        else:
            found.append(score_text(text, backbone, tokenizer, context_length=48, stride=16).short)
    torch.testing.assert_close(*found, rtol=0, atol=0)


BATCHES = ("train", "validation", "predict")


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
def test_a_batch_of_a_trainer_on_a_cpu_shows_its_tokens(bars, model_dir, tmp_path, stage):
    data = RecallDataModule(sequence_length=64, train_documents=2, validation_documents=2, cache_dir=str(tmp_path))
    module = LongContextLM(model_config=TINY, context_length=16, stride=16)
    left_open = []
    hooks = {f"on_{name}_batch_end": lambda *_: left_open.append(progress._bar.get()) for name in BATCHES}
    callbacks = [StepProgress(), LambdaCallback(**hooks)]
    options = {"accelerator": "cpu", "callbacks": callbacks, "logger": False, "max_steps": 1}
    runner = Trainer(**options, enable_checkpointing=False, num_sanity_val_steps=0, default_root_dir=tmp_path)
    getattr(runner, stage)(module, data)
    # A long pass has 64 tokens, and the 2 windows of a short pass 32 each.
    tokens = 64 if stage == "validate" else 64 + 2 * 32
    assert {bar.name for bar in bars} == {"step 0" if stage == "fit" else "this batch"}
    assert all(bar.seen[-1] == "closed" and bar.seen[-2] >= tokens for bar in bars)
    assert left_open == [None] * len(bars), "each bar is closed with its batch"
