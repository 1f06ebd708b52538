import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.packing.packing import pack_documents
from datamodules.packing.up_sampling import LongDocuments, pack_in_order

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 4)


def borders_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)])


@given(LENGTHS, st.data())
def test_rows_hold_the_tokens_of_the_documents_in_that_order(lengths, data):
    order = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20)))
    tokens, borders = np.arange(sum(lengths)), borders_of(lengths)
    expected = np.concatenate([tokens[borders[each] : borders[each + 1]] for each in order])
    if len(expected) < 4:
        return
    rows = pack_in_order(borders, order, lambda borders: pack_documents(borders, 4))
    packed = [[tokens[start:stop] for start, stop in rows.row(index)] for index in range(len(rows))]
    assert np.concatenate([part for row in packed for part in row]).tolist() == expected[: 4 * len(rows)].tolist()
    for start, stop in rows.segments:  # each in one document
        assert np.searchsorted(borders, start, side="right") == np.searchsorted(borders, stop, side="left")
    assert rows.dropped_tokens == len(expected) - 4 * len(rows)


@given(LENGTHS)
def test_the_order_of_the_corpus_changes_nothing(lengths):
    borders = borders_of(lengths)
    plain = pack_documents(borders, 4)
    ordered = pack_in_order(borders, np.arange(len(lengths)), lambda borders: pack_documents(borders, 4))
    assert np.array_equal(plain.segments, ordered.segments)
    assert np.array_equal(plain.row_borders, ordered.row_borders)


@given(LENGTHS, st.sampled_from([1.0, 1.3, 2.0, 2.5, 4.0]))
def test_long_documents_are_repeated_as_often_as_their_weight_says(lengths, weight):
    counts = np.bincount(LongDocuments(4, weight).order(borders_of(lengths)), minlength=len(lengths))
    long = np.array(lengths) > 4
    assert (counts[~long] == 1).all()
    assert set(counts[long].tolist()) <= {int(weight), int(np.ceil(weight))}
    assert counts[long].sum() == pytest.approx(weight * long.sum(), abs=1)


def test_copies_stand_behind_the_whole_corpus_and_are_reported(caplog):
    caplog.set_level("INFO")
    order = LongDocuments(longer_than=3, weight=3).order(borders_of([4, 3, 5, 1]))
    assert order.tolist() == [0, 1, 2, 3, 0, 2, 0, 2]
    assert "2 of 4 documents are longer than 3 tokens: 69.2% of the tokens, 87.1% with" in caplog.text


def test_a_weight_below_one_is_refused():
    with pytest.raises(ValueError, match=r"set it to 1 to 1000, got 0\.5"):
        LongDocuments(longer_than=3, weight=0.5)
