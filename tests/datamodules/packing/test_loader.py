import tempfile

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.packing.loader import ResumableLoader
from datamodules.packing.samplers import RowSampler
from tests.support.trainers import Recorder, quiet_trainer

ROWS, BATCH_SIZE = 9, 2  # five batches, the last one short


def loader(num_workers=0, seed=3):
    sampler = RowSampler(ROWS, seed=seed)
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return ResumableLoader(range(ROWS), batch_size=BATCH_SIZE, sampler=sampler, **workers)


def rows_seen(num_workers, callback, checkpoint=None, **settings):
    module = Recorder(torch.Tensor.tolist)
    one = quiet_trainer(tempfile.mkdtemp(), callback, enable_checkpointing=True, max_epochs=3, **settings)
    one.fit(module, loader(num_workers), ckpt_path=checkpoint)
    return module.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [1.0, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_run_sees_the_rows_that_are_left(tmp_path, limit):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    uninterrupted = rows_seen(0, save, limit_train_batches=limit)
    per_epoch = 5 if limit == 1.0 else 3
    for step in range(1, 3 * per_epoch):
        none = ModelCheckpoint(tmp_path / "none", save_top_k=0)
        workers = 2 * (step in (1, per_epoch))
        seen = rows_seen(workers, none, tmp_path / f"step={step}.ckpt", limit_train_batches=limit)
        assert seen == uninterrupted[step:]


@pytest.mark.filterwarnings("ignore")
def test_the_first_rows_are_overfitted_again_and_again(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    seen = rows_seen(0, save, overfit_batches=2)
    assert seen == [[0, 1], [2, 3]] * 3
    none = ModelCheckpoint(tmp_path / "none", save_top_k=0)
    assert rows_seen(2, none, tmp_path / "step=2.ckpt", overfit_batches=2) == seen[2:]


def test_state_of_another_order_is_not_used(caplog):
    interrupted = loader()
    next(iter(interrupted))
    other = loader(seed=4)
    other.load_state_dict(interrupted.state_dict())
    assert "The epoch starts over" in caplog.text
    assert "'seed': (3, 4)" in caplog.text
    assert len(list(other)) == 5


@pytest.mark.filterwarnings("ignore")
def test_checkpoint_at_the_end_of_an_epoch(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    uninterrupted = rows_seen(0, save)
    none = ModelCheckpoint(tmp_path / "none", save_top_k=0)
    assert rows_seen(0, none, tmp_path / "epoch=0.ckpt") == uninterrupted[5:]
