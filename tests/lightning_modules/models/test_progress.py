"""Forward passes advance a bar layer by layer."""

import math

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback

from datamodules import RecallDataModule
from lightning_modules.functional.windows import ShortContext, short_context_windows
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.models import progress
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_frozen
from lightning_modules.models.progress import count_tokens, show_progress
from lightning_modules.scoring.scored_model import score_text
from lightning_modules.training.monitoring.progress import StepProgress
from tests.conftest import make_text
from tests.support.bars import replace_bars
from tests.support.tiny_training import TINY


@pytest.fixture
def bars(monkeypatch):
    return replace_bars(monkeypatch, progress)


def test_a_document_takes_the_tokens_of_its_long_pass_and_its_windows(bars, model_dir, tokenizer):
    backbone, text, sizes = load_frozen(ModelConfig(str(model_dir)), "cpu"), make_text(200, seed=1), (48, 16)
    length = len(score_text(text, backbone, tokenizer, ShortContext(48, 16)).long)
    assert not bars  # nobody asked
    with show_progress([text], "evaluator", [7]) as documents:
        for each in documents:
            score_text(each, backbone, tokenizer, ShortContext(48, 16))
            bars[0].seen.append("scored")
    expected = count_tokens(length, ShortContext(sizes[0], sizes[1]))
    before = bars[0].seen[: bars[0].seen.index("scored")]
    assert expected <= before[-1] < expected + 48  # a last, shorter window is padded in its pass
    layers = backbone.model.config.num_hidden_layers
    windows = len(short_context_windows([0, length], ShortContext(48, 16)))
    passes = math.ceil(windows / backbone.windows_per_pass(48 + 16))
    first = windows // passes * (48 + 16)  # tokens of the first pass
    assert before[0] == pytest.approx(first / layers)  # before it is over
    assert bars[0].seen[-2:] == [7, "closed"]  # the plan is what counts, also if scores were stored


def test_windows_by_hand():
    assert count_tokens(11, ShortContext(4, 3)) == 11 + 7 + 5
    assert count_tokens(5, ShortContext(4, 3)) == 5


def test_bars_are_closed_by_an_error(bars):
    def fail():
        with show_progress([1, 2], "model", [3, 4]) as documents:
            raise ValueError(next(documents))

    with pytest.raises(ValueError, match="1"):
        fail()
    assert bars[0].seen == ["closed"]
    assert progress._bar.get() is None


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
