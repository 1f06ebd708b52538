import os

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from callbacks import StepCheckpoint
from lightning_modules.training.checkpoints.sharded import CheckpointError
from tests.support.trainers import quiet_trainer

BATCHES, ACCUMULATE = 7, 3  # the last step of an epoch has one batch


class Line(LightningModule):
    """One weight, trained towards numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        self.log("weight", self.weight)

    def training_step(self, batch, batch_idx):
        return (self.weight - batch.float().mean()) ** 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers:
    """Batches of one number each; goes on where it was."""

    done = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for number in range(self.done % BATCHES + 1, BATCHES + 1):
            self.done = number
            yield torch.tensor([number])

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def fit(module, steps, callback, checkpoint=None, **options):
    settings = {"accumulate_grad_batches": ACCUMULATE, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    trainer = quiet_trainer(callback.dirpath, callback, max_steps=steps, **settings | options)
    trainer.fit(module, Numbers(), DataLoader(range(BATCHES)), ckpt_path=checkpoint)
    return trainer


def fitted(folder, callback, steps, checkpoint=None):
    save = callback(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Line(), steps, save, checkpoint)
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
def test_the_last_step_is_saved_and_a_longer_run_goes_on_in_its_epoch(tmp_path):
    save = {"every_n_train_steps": 100, "filename": "{step}"}
    run = fit(Line(), 2, StepCheckpoint(tmp_path / "short", **save))
    assert [path.name for path in (tmp_path / "short").iterdir()] == ["step=2.ckpt"]
    longer = fit(Line(), 4, StepCheckpoint(tmp_path / "longer", **save), tmp_path / "short" / "step=2.ckpt")
    whole = fit(Line(), 4, StepCheckpoint(tmp_path / "whole", **save))
    assert longer.model.weight == whole.model.weight != run.model.weight
    assert longer.current_epoch == whole.current_epoch
    epochs = StepCheckpoint(tmp_path / "epochs", **save)
    fit(Line(), -1, epochs, max_epochs=2)
    assert [path.name for path in (tmp_path / "epochs").iterdir()] == ["step=6.ckpt"]


class Failing(Line):
    """Fails in one place."""

    def __init__(self, where, error=RuntimeError):
        super().__init__()
        self.where, self.error = where, error

    def fail(self, where, batch_idx):
        if where == self.where and batch_idx == 4:
            raise self.error("planned")

    def training_step(self, batch, batch_idx):
        self.fail("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fail("validation", batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.fail("update", batch_idx - 1)  # the last batch of the second step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("where", "error", "saved"),
    [
        ("training", RuntimeError, ["step=1.ckpt"]),
        ("training", CheckpointError, []),
        ("validation", RuntimeError, ["step=1.ckpt"]),
        ("update", RuntimeError, []),
    ],
)
def test_what_is_saved_after_an_exception(tmp_path, where, error, saved):
    save = {"every_n_train_steps": 100, "filename": "{step}", "save_on_exception": True}
    callback = StepCheckpoint(tmp_path / "failed", **save)
    with pytest.raises(error, match="planned"):
        fit(Failing(where, error), 4, callback, val_check_interval=3)
    found = [path.name for path in (tmp_path / "failed").glob("*")]
    assert found == saved
    if saved:
        resumed = fit(Failing(None), 4, StepCheckpoint(tmp_path / "resumed", **save), tmp_path / "failed" / saved[0])
        assert resumed.model.weight == fit(Failing(None), 4, StepCheckpoint(tmp_path / "whole", **save)).model.weight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("every", "kept"), [(100, [5, 8]), (1, [7, 8])])
def test_a_run_that_is_stopped_again_and_again_keeps_as_many_as_another(tmp_path, every, kept):
    newest = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": "link"}

    class Stopped(Line):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == self.last:
                raise RuntimeError("planned")

    module = Stopped()
    for module.last in (1, 2, 5, 8):
        save = {"every_n_train_steps": every, "filename": "{step}", "save_on_exception": True, **newest}
        before = sorted(tmp_path.glob("step=*"), key=lambda path: int(path.stem[5:]))
        for number, path in enumerate(before):  # as if a copy or a moved clock had turned the times around
            os.utime(path, (4e9 - number,) * 2)
        with pytest.raises(RuntimeError, match="planned"):
            fit(module, 9, StepCheckpoint(tmp_path, **save), before[-1] if before else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", *(f"step={step}.ckpt" for step in kept)]
    assert (tmp_path / "last.ckpt").resolve().name == "step=8.ckpt"


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_saved_before_the_first_step_of_a_resumed_run(tmp_path):
    save = {"every_n_train_steps": 1, "filename": "{step}", "save_on_exception": True}
    fit(Line(), 2, StepCheckpoint(tmp_path / "short", **save))

    class Start(Line):
        def on_train_start(self):
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        fit(Start(), 4, StepCheckpoint(tmp_path / "resumed", **save), tmp_path / "short" / "step=2.ckpt")
    assert not list(tmp_path.glob("resumed/*"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 1}])
def test_a_validation_in_the_middle_of_a_step_is_saved_when_the_step_is_complete(tmp_path, options):
    for callback in (StepCheckpoint, ModelCheckpoint):
        folder = tmp_path / callback.__name__
        save = callback(folder, filename="{step}", monitor="weight", save_top_k=-1, **options)
        settings = {"accumulate_grad_batches": 3, "val_check_interval": 2, "enable_checkpointing": True}
        trainer = quiet_trainer(folder, save, max_steps=6, **settings)
        trainer.fit(Line(), DataLoader(range(BATCHES)), DataLoader(range(2)))
        saved = [batches_done(torch.load(path)["loops"]["fit_loop"]) for path in sorted(folder.iterdir())]
        assert saved, "validation metrics lead to checkpoints"
        assert all(done in (3, 6, 7) for done in saved) == (callback is StepCheckpoint), saved


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("processes", "asked"), [(1, True), (2, False)])
def test_loaders_of_several_processes_are_not_asked_at_each_step(tmp_path, monkeypatch, processes, asked):
    asks = []
    monkeypatch.setattr(Numbers, "state_dict", lambda self: asks.append(1) or {})
    monkeypatch.setattr(Trainer, "world_size", processes)
    fit(Line(), 4, StepCheckpoint(tmp_path, save_top_k=0))
    assert bool(asks) == asked
