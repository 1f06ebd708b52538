import lightning
import numpy as np
import pytest
import torch

from datamodules import RecallDataModule
from datamodules.packing.curriculum import LengthCurriculum, cut_rows
from datamodules.packing.sequences import collate_rows, make_row
from lightning_modules.batch import IGNORE_INDEX
from tests.support.trainers import Recorder, quiet_trainer


def slow_cut(row, ends, length):
    """Pieces of one row, token by token: ids, labels, positions, boundaries."""
    pieces = []
    for start in range(0, len(row), length):
        ids, labels, positions, boundaries = [], [], [], [0]
        for token in range(start, min(start + length, ends[-1])):
            first = token == start or token in ends
            positions.append(0 if first else positions[-1] + 1)
            labels.append(IGNORE_INDEX if first else row[token])
            ids.append(row[token])
            if token + 1 in ends or token + 1 in (start + length, ends[-1]):
                boundaries.append(token + 1 - start)
        if ids:
            pad = length - len(ids)
            pieces.append((ids + [0] * pad, labels + [IGNORE_INDEX] * pad, positions + [0] * pad, boundaries))
    return pieces


@pytest.mark.parametrize("length", [1, 3, 4, 12])
@pytest.mark.parametrize("seed", range(3))
def test_pieces_equal_a_slow_reference(length, seed):
    rng = np.random.default_rng(seed)
    rows, expected = [], []
    for size in (12, int(rng.integers(1, 13))):  # the second one is padded in the batch
        ends = sorted({*rng.integers(1, size + 1, 3).tolist(), size})
        tokens = rng.integers(1, 99, size)
        rows.append(make_row(tokens, np.array(ends)))
        expected += slow_cut(tokens.tolist(), ends, length)
    batch = collate_rows(rows)
    before = batch["labels"].clone()
    cut = cut_rows(batch, length)
    assert torch.equal(batch["labels"], before), "the batch is left alone"
    keys = ("input_ids", "labels", "position_ids")
    found = zip(*(cut[key].tolist() for key in keys), cut["document_boundaries"], strict=True)
    assert list(found) == expected


def shapes_trained_on(folder, checkpoint=None, share=0.5, **settings):
    data = RecallDataModule(
        train_documents=5,  # rows, and batches in an epoch
        sequence_length=12,
        validation_documents=1,
        cache_dir=str(folder),
        curriculum=LengthCurriculum(sequence_length=4, share=share),
    )
    recorder = Recorder(lambda batch: tuple(batch["input_ids"].shape))
    trainer = quiet_trainer(folder, num_sanity_val_steps=0, **settings)
    trainer.fit(recorder, data, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "last.ckpt")
    assert all(batch["input_ids"].shape == (1, 12) for batch in data.val_dataloader())
    return recorder.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "short", "long"),
    [
        ({"max_steps": 6}, 3, 3),
        ({"max_steps": 7, "share": 0.8}, 6, 1),
        ({"max_epochs": 2}, 5, 5),
        ({"max_epochs": 4, "max_steps": 6}, 3, 3),
        ({"max_steps": 4, "accumulate_grad_batches": 2}, 4, 3),  # the last of an epoch's three steps has one batch
    ],
)
def test_rows_are_short_in_the_first_share_of_the_steps(tmp_path, options, short, long):
    assert shapes_trained_on(tmp_path, **options) == short * [(3, 4)] + long * [(1, 12)]


@pytest.mark.parametrize("share", [0.0, 1.0, 80, float("nan")])
def test_a_share_that_is_no_fraction_is_refused(share):
    with pytest.raises(ValueError, match=r"`curriculum\.share`"):
        RecallDataModule(sequence_length=12, curriculum=LengthCurriculum(sequence_length=4, share=share))


def test_a_share_of_an_endless_run_is_refused():
    endless = RecallDataModule(sequence_length=12, curriculum=LengthCurriculum(sequence_length=4, share=0.5))
    endless.trainer = lightning.Trainer(max_epochs=-1, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match=r"`trainer\.max_steps`"):
        endless.check_trainer()


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_has_the_switch_of_its_own_length_and_warns_of_it(tmp_path):
    shapes_trained_on(tmp_path, max_steps=4)
    with pytest.warns(UserWarning, match="step 3.*step 2"):
        assert shapes_trained_on(tmp_path, checkpoint=tmp_path / "last.ckpt", max_steps=6) == [(1, 12)] * 2
