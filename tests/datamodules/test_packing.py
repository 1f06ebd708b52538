import time

import numpy as np
import pytest

from datamodules.packing import pack_documents


def rows_of(borders, sequence_length):
    packed = pack_documents(np.array(borders), sequence_length)
    return [packed.row(index).tolist() for index in range(len(packed))], packed.dropped_tokens


@pytest.mark.parametrize(
    ("borders", "sequence_length", "rows", "dropped"),
    [
        ([0, 4], 4, [[[0, 4]]], 0),
        ([0, 5], 4, [[[0, 4]]], 1),
        ([0, 2, 4], 4, [[[0, 2], [2, 4]]], 0),
        ([0, 3, 9], 4, [[[0, 3], [3, 4]], [[4, 8]]], 1),
        ([0, 1, 2, 3], 1, [[[0, 1]], [[1, 2]], [[2, 3]]], 0),
        ([0, 4, 8], 4, [[[0, 4]], [[4, 8]]], 0),
        ([0, 4, 7], 4, [[[0, 4]]], 3),
        ([0, 2, 2, 4], 4, [[[0, 2], [2, 4]]], 0),  # an empty document leaves no trace
        ([0, 10], 3, [[[0, 3]], [[3, 6]], [[6, 9]]], 1),
    ],
)
def test_rows_written_out(borders, sequence_length, rows, dropped):
    assert rows_of(borders, sequence_length) == (rows, dropped)


def test_every_token_but_the_last_ones_is_in_one_row_and_no_segment_crosses_a_border():
    rng = np.random.default_rng(0)
    borders = np.concatenate([[0], np.cumsum(rng.integers(1, 50, size=500))])
    packed = pack_documents(borders, 64)
    assert (packed.segments[1:, 0] == packed.segments[:-1, 1]).all()
    assert packed.segments[-1, 1] + packed.dropped_tokens == borders[-1]
    for row in range(len(packed)):
        assert (packed.row(row)[:, 1] - packed.row(row)[:, 0]).sum() == 64
    document = np.searchsorted(borders, packed.segments[:, 0], side="right")
    assert (packed.segments[:, 1] <= borders[document]).all()


@pytest.mark.parametrize(
    ("sequence_length", "message"), [(11, "10 tokens do not fill one row"), (0, "1 or more, got 0")]
)
def test_refuses_a_length_without_rows(sequence_length, message):
    with pytest.raises(ValueError, match=message):
        pack_documents(np.array([0, 4, 10]), sequence_length)


def test_a_corpus_of_pg19_size_takes_less_than_a_second():
    borders = np.arange(28_602 + 1, dtype=np.int64) * 105_000
    start = time.perf_counter()
    assert len(pack_documents(borders, 32_768)) == 3_003_210_000 // 32_768
    assert time.perf_counter() - start < 1
