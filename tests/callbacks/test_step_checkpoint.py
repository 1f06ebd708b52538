import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from callbacks import StepCheckpoint

BATCHES, ACCUMULATE = 7, 3  # the last step of an epoch has one batch


class Line(LightningModule):
    """One weight, trained towards numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return (self.weight - batch.float().mean()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch, batch_idx):
        self.log("weight", self.weight)


def fitted(folder, callback, steps, checkpoint=None):
    save = callback(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=steps, accumulate_grad_batches=ACCUMULATE, callbacks=[save], **silent)
    trainer.fit(Line(), DataLoader(range(BATCHES)), ckpt_path=checkpoint)
    return {path.name: torch.load(path)["loops"]["fit_loop"] for path in sorted(folder.iterdir())}


def batches_done(loops):
    return loops["epoch_loop.batch_progress"]["current"]["ready"]


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_saves_no_half_a_step(tmp_path):
    whole = fitted(tmp_path / "whole", StepCheckpoint, 6)
    assert [batches_done(loops) for loops in whole.values()] == [3, 6, 7, 3, 6, 7]
    for callback, expected in ((StepCheckpoint, [6, 7]), (ModelCheckpoint, [4, 6, 7])):
        resumed = fitted(tmp_path / callback.__name__, callback, 3, tmp_path / "whole" / "step=1.ckpt")
        assert [batches_done(loops) for loops in resumed.values()] == expected, callback


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 1}])
def test_a_validation_in_the_middle_of_a_step_is_saved_when_the_step_is_complete(tmp_path, options):
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    for callback in (StepCheckpoint, ModelCheckpoint):
        folder = tmp_path / callback.__name__
        save = callback(folder, filename="{step}", monitor="weight", save_top_k=-1, **options)
        trainer = Trainer(max_steps=6, accumulate_grad_batches=3, val_check_interval=2, callbacks=[save], **silent)
        trainer.fit(Line(), DataLoader(range(BATCHES)), DataLoader(range(2)))
        saved = [batches_done(torch.load(path)["loops"]["fit_loop"]) for path in sorted(folder.iterdir())]
        assert saved, "validation metrics lead to checkpoints"
        assert all(done in (3, 6, 7) for done in saved) == (callback is StepCheckpoint), saved
