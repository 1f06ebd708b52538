import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules import TextDataModule
from datamodules.packing.positions import PoSE
from tests.datamodules.packing.test_sequences import dataset


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    chunks=st.integers(2, 5),
    room=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_positions_are_those_of_chunks_that_skip(lengths, chunks, room, seed):
    target = sum(lengths) + room
    positions = PoSE(target, chunks).positions(np.cumsum(lengths), [seed])
    start = 0
    for length in lengths:
        document = positions[start : start + length].tolist()
        start += length
        assert document[0] == 0, "every document begins at 0"
        assert document[-1] < target
        skips = [after - before - 1 for before, after in pairwise(document)]
        assert all(skip >= 0 for skip in skips)
        assert sum(skip > 0 for skip in skips) < chunks
    assert start == len(positions)


def test_cuts_and_skips_are_uniform():
    # 3 tokens and 5 positions: the cut is before token 1 or 2, and 0, 1 or 2 positions are skipped there.
    expected = [(0, 1, 2), (0, 1, 2), (0, 2, 3), (0, 3, 4), (0, 1, 3), (0, 1, 4)]
    draws = 6000
    pose = PoSE(5)
    counts = Counter(tuple(pose.positions(np.array([3]), [seed]).tolist()) for seed in range(draws))
    assert counts.keys() == set(expected)
    for positions, count in counts.items():
        fraction = expected.count(positions) / 6
        assert abs(count - draws * fraction) < 5 * (draws * fraction * (1 - fraction)) ** 0.5


def test_positions_of_a_row_depend_on_seed_and_index_only():
    pose = PoSE(10_000)
    plain = dataset(5)
    skipping = dataset(5, pose=pose, pose_seed=(3,))
    np.random.seed(1)
    backwards = [skipping[index]["position_ids"].tolist() for index in (1, 0)]
    assert backwards[::-1] == [skipping[index]["position_ids"].tolist() for index in range(2)]
    assert backwards[1] == pose.positions(np.array([3, 5]), [3, 0]).tolist()
    other_seed = dataset(5, pose=pose, pose_seed=(4,))
    assert other_seed[0]["position_ids"].tolist() != backwards[1]
    # A resumed run must notice each change, and nothing else of a row changes.
    assert len({each.checksum() for each in (plain, skipping, other_seed)}) == 3
    for index in range(2):
        for name in ("input_ids", "labels"):
            assert (skipping[index][name] == plain[index][name]).all()
        assert skipping[index]["document_boundaries"] == plain[index]["document_boundaries"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pose": PoSE(64)}, "`pose.target_length` = 64 must be above `sequence_length` = 64"),
        ({"pose": PoSE(100, chunks=1)}, "`pose.chunks` must be an integer of 2 or more, got 1"),
        ({"pose": PoSE(100), "seed": -1}, "`seed` must be an integer of 0 or more, got -1"),
        ({"pose": PoSE(100), "influence": "folder"}, "skipped positions: remove `influence`"),
        ({"pose": PoSE(100), "curriculum": {"sequence_length": 32, "share": 0.5}}, "remove it, or `pose`"),
    ],
)
def test_settings_that_do_not_go_together(settings, named, word_tokenizer):
    with pytest.raises(ValueError, match=re.escape(named)):
        TextDataModule(word_tokenizer, train="x.txt", sequence_length=64, **settings)
