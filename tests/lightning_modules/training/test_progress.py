import pytest
import torch
from lightning.pytorch import Trainer

import lightning_modules.training.progress as progress
from datamodules import RecallDataModule
from lightning_modules.long_context_lm import LongContextLM
from lightning_modules.training.progress import StepProgress

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024}


class Bar:
    """Keeps what a progress bar is told."""

    def __init__(self, name, *, unit, total, initial=0, leave=True, scaled=True):
        self.name, self.total, self.n, self.seen, self.postfix = name, total, initial, [], {}

    def set_postfix(self, values, refresh):
        self.postfix = values

    def update(self, count=1):
        self.n += count
        self.seen.append(self.n)

    def close(self):
        self.seen.append("closed")


@pytest.fixture
def bars(monkeypatch):
    made = []
    monkeypatch.setattr(progress, "progress_bar", lambda *args, **kwargs: made.append(Bar(*args, **kwargs)) or made[-1])
    return made


def fit(root, checkpoint=None, **options):
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[StepProgress()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=root,
        **options,
    )
    torch.manual_seed(0)
    data = RecallDataModule(
        sequence_length=64, train_documents=12, validation_documents=3, cache_dir=str(root / "cache")
    )
    trainer.fit(LongContextLM(model_config=TINY, context_length=16, stride=16), data, ckpt_path=checkpoint)
    return trainer


def test_steps_are_those_of_the_optimizer_with_accumulation_and_after_a_resume(bars, tmp_path):
    fit(tmp_path, max_steps=2, accumulate_grad_batches=4).save_checkpoint(tmp_path / "two.ckpt")
    steps, *evaluations = bars
    assert (steps.total, steps.seen) == (2, [1, 2, "closed"])
    assert set(steps.postfix) == {"loss", "tokens/s"}
    assert all((bar.total, bar.seen) == (3, [1, 2, 3, "closed"]) for bar in evaluations)
    bars.clear()
    fit(tmp_path, tmp_path / "two.ckpt", max_steps=5, accumulate_grad_batches=4)
    assert (bars[0].total, bars[0].seen) == (5, [3, 4, 5, "closed"])


def test_the_total_is_known_of_epochs_as_well(bars, tmp_path):
    fit(tmp_path, max_epochs=2, accumulate_grad_batches=5, limit_val_batches=0)  # 12 batches, the last step has two
    (steps,) = bars
    assert (steps.total, steps.seen) == (6, [1, 2, 3, 4, 5, 6, "closed"])


def test_predictions_are_counted(bars, tmp_path):
    data = RecallDataModule(
        sequence_length=64,
        train_documents=4,
        test_documents=3,
        validation_documents=1,
        cache_dir=str(tmp_path / "cache"),
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", callbacks=[StepProgress()], use_distributed_sampler=False, **quiet)
    trainer.predict(LongContextLM(model_config=TINY, context_length=16, stride=16), data)
    (bar,) = bars
    assert (bar.name, bar.total, bar.seen) == ("prediction", 3, [1, 2, 3, "closed"])
