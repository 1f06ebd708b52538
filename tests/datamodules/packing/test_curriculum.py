from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules.packing.curriculum import CurriculumStages, LengthCurriculum, cut_rows
from datamodules.packing.sequences import collate_rows, make_row
from lightning_modules.batch import IGNORE_INDEX


def slow_cut(row, ends, length):
    """Pieces of one row, token by token: ids, labels, positions, borders."""
    pieces = []
    for start in range(0, len(row), length):
        ids, labels, positions, borders = [], [], [], [0]
        for token in range(start, min(start + length, ends[-1])):
            first = token == start or token in ends
            positions.append(0 if first else positions[-1] + 1)
            labels.append(IGNORE_INDEX if first else row[token])
            ids.append(row[token])
            if token + 1 in ends or token + 1 in (start + length, ends[-1]):
                borders.append(token + 1 - start)
        if ids:
            pad = length - len(ids)
            pieces.append((ids + [0] * pad, labels + [IGNORE_INDEX] * pad, positions + [0] * pad, borders))
    return pieces


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_equal_a_slow_reference(length, seed):
    rng = np.random.default_rng(seed)
    rows, expected = [], []
    for size in (12, int(rng.integers(1, 13))):  # the second one is padded in the batch
        ends = sorted({*rng.integers(1, size + 1, 3).tolist(), size})
        tokens = rng.integers(1, 99, size)
        rows.append(make_row(tokens, np.array(ends)))
        expected += slow_cut(tokens.tolist(), ends, length)
    cut = cut_rows(collate_rows(rows), length)
    keys = ("input_ids", "labels", "position_ids")
    found = zip(*(cut[key].tolist() for key in keys), cut["document_borders"], strict=True)
    assert list(found) == expected


def test_no_token_is_lost_or_doubled_and_the_batch_is_left_alone():
    batch = collate_rows([make_row(np.arange(8), np.array([3, 8])), make_row(np.arange(8, 16), np.array([8]))])
    before = batch["labels"].clone()
    assert cut_rows(batch, 4)["input_ids"].flatten().tolist() == list(range(16))
    assert torch.equal(batch["labels"], before)


def stages(share, *, batches=10, accumulate=1, max_steps=-1, max_epochs=None):
    trainer = SimpleNamespace(
        num_training_batches=batches, accumulate_grad_batches=accumulate, max_steps=max_steps, max_epochs=max_epochs
    )
    return CurriculumStages(LengthCurriculum(sequence_length=4, share=share), trainer)


def simulated_switch(share, batches, accumulate, steps):
    """Batches until that share of the steps is done, counted one by one."""
    done = 0
    for batch in range(10**6):
        if done >= round(share * steps):
            return batch
        done += (batch % batches + 1) % accumulate == 0 or batch % batches == batches - 1
    return None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("accumulate", [1, 3, 4, 20])
@pytest.mark.parametrize("max_steps", [5, 37])
def test_the_switch_comes_after_its_share_of_the_steps(share, accumulate, max_steps):
    assert stages(share, accumulate=accumulate, max_steps=max_steps).switch == simulated_switch(
        share, 10, accumulate, max_steps
    )


def test_epochs_limit_the_steps_too():
    assert stages(0.5, max_epochs=4).switch == 20
    assert stages(0.5, max_epochs=4, max_steps=10).switch == 5
    assert stages(0.5, max_epochs=4, max_steps=1000).switch == 20


def test_batches_are_cut_until_the_switch_in_whichever_epoch():
    batch = collate_rows([make_row(np.arange(8), np.array([8]))])
    cut = [
        len(stages(0.6, batches=5, max_steps=20)(batch, epoch, number)["input_ids"]) == 2
        for epoch in range(4)
        for number in range(5)
    ]
    assert cut == [True] * 12 + [False] * 8


def test_a_moved_switch_is_told(caplog):
    before = stages(0.5, max_steps=8)
    stages(0.5, max_steps=8).compare(before.state())
    assert not caplog.text
    stages(0.5, max_steps=16).compare(before.state())
    assert "after batch 8 of the run; for the checkpoint's run it was 4" in caplog.text


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"give `trainer\.max_steps` or `max_epochs`"):
        stages(0.5, max_epochs=-1)
    for share in (1.0, 1.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            LengthCurriculum(sequence_length=4, share=share)
    for length in (4, 6, 2):
        with pytest.raises(ValueError, match="must divide `sequence_length`"):
            LengthCurriculum(sequence_length=4, share=0.5).check(length)
    LengthCurriculum(sequence_length=4, share=0.5).check(8)
