"""Packing against one document at a time, and what must hold of every strategy for any documents."""

import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.packing.packing import (
    LongDocuments,
    best_fit,
    best_fit_decreasing,
    chunk,
    concat,
    pack_documents,
    pack_in_order,
)

STRATEGIES = {"chunk": chunk, "concat": concat, "best_fit": best_fit}

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.sampled_from([1, 8, 16, 40])), max_size=40)
SEQUENCE_LENGTH = st.integers(1, 16)


def borders_of(lengths):
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])


def lists(packed):
    return [packed.row(index).tolist() for index in range(len(packed))]


# ------------------------------------------------------------------------------------------------- slow and obvious


def rows_by_chunk(lengths, size):
    rows, start = [], 0
    for length in lengths:
        rows += [[[start + first, start + first + size]] for first in range(0, length - size + 1, size)]
        start += length
    return rows


def rows_by_concat(lengths, size):
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    rows = []
    for first in range(0, len(document) - size + 1, size):
        row = [[first, first]]
        for token in range(first, first + size):
            if document[token] != document[row[-1][0]]:
                row.append([token, token])
            row[-1][1] = token + 1
        rows.append(row)
    return rows


def spaces_by_best_fit(lengths, size):
    """Free space of each row, one item and one row at a time."""
    spaces = []
    for item in sorted((length % size for length in lengths if length % size), reverse=True):
        holds = [number for number, space in enumerate(spaces) if space >= item]
        if holds:
            spaces[min(holds, key=lambda number: spaces[number])] -= item
        else:
            spaces.append(size - item)
    return spaces + [0] * sum(length // size for length in lengths)


# ------------------------------------------------------------------------------------------------------ properties


@pytest.mark.parametrize("packing", STRATEGIES)
@given(lengths=LENGTHS, size=SEQUENCE_LENGTH)
def test_every_token_once_or_dropped_and_no_segment_crosses_a_border(packing, lengths, size):
    boundaries = borders_of(lengths)
    packed = STRATEGIES[packing](boundaries, size)
    seen = Counter(token for start, stop in packed.segments.tolist() for token in range(start, stop))
    assert set(seen) <= set(range(boundaries[-1]))
    assert set(seen.values()) <= {1}
    assert len(seen) == packed.tokens == boundaries[-1] - packed.dropped_tokens
    for start, stop in packed.segments.tolist():
        assert start < stop
        assert any(begin <= start and stop <= end for begin, end in pairwise(boundaries))
    rows = lists(packed)
    sizes = [sum(stop - start for start, stop in row) for row in rows]
    assert all(0 < filled <= size for filled in sizes)
    assert packed.padded_tokens == sum(size - filled for filled in sizes)
    assert packed.row_boundaries[0] == 0
    assert packed.row_boundaries[-1] == len(packed.segments)
    assert rows == sorted(rows)
    assert all(row == sorted(row) for row in rows)
    assert packed.segments.dtype == packed.row_boundaries.dtype == np.int64


@pytest.mark.parametrize("packing", STRATEGIES)
@given(lengths=LENGTHS, size=SEQUENCE_LENGTH)
def test_truncated_documents_are_those_with_tokens_in_a_row_but_not_all_in_one(packing, lengths, size):
    boundaries = borders_of(lengths)
    packed = STRATEGIES[packing](boundaries, size)
    cut = 0
    for begin, end in pairwise(boundaries.tolist()):
        inside = [max(min(stop, end) - max(start, begin), 0) for start, stop in packed.segments.tolist()]
        cut += sum(inside) > 0 and max(inside) < end - begin
    assert packed.truncated_documents == cut


@given(lengths=LENGTHS, size=SEQUENCE_LENGTH)
def test_chunk_is_one_document_at_a_time(lengths, size):
    packed = chunk(borders_of(lengths), size)
    assert lists(packed) == rows_by_chunk(lengths, size)
    assert packed.padded_tokens == 0


@given(lengths=LENGTHS, size=SEQUENCE_LENGTH)
def test_concat_is_one_token_at_a_time(lengths, size):
    packed = concat(borders_of(lengths), size)
    assert lists(packed) == rows_by_concat(lengths, size)
    assert packed.padded_tokens == 0
    assert packed.dropped_tokens == sum(lengths) % size


@given(lengths=LENGTHS, size=SEQUENCE_LENGTH)
def test_best_fit_is_one_item_at_a_time(lengths, size):
    packed = best_fit(borders_of(lengths), size)
    spaces = [size - sum(stop - start for start, stop in row) for row in lists(packed)]
    assert sorted(spaces) == sorted(spaces_by_best_fit(lengths, size))
    assert packed.dropped_tokens == 0
    assert packed.truncated_documents == sum(length > size for length in lengths), "only what is longer than a row"


# ------------------------------------------------------------------------------------------------ written-out cases


@pytest.mark.parametrize(
    ("packing", "lengths", "size"),
    [("concat", [4, 6], 11), ("chunk", [4, 6], 7), ("best_fit", [0, 0], 5), ("best_fit", [], 5)],
)
def test_text_that_fills_no_row_is_refused(packing, lengths, size):
    with pytest.raises(ValueError, match=f"`sequence_length` = {size}"):
        pack_documents(borders_of(lengths), size, packing)


def count_calls(function, *arguments):
    """Return the result, and the calls that it took: a clock would measure what else the machine does."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(*arguments), calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("lengths", [np.arange(1, 4097).repeat(5), np.full(20_000, 1), np.arange(20_000) % 90 + 1])
def test_no_lengths_are_slow_to_fit(lengths):
    bins, calls = count_calls(best_fit_decreasing, lengths, 4096)
    assert calls < 8 * len(lengths)
    assert np.bincount(bins, lengths).max() <= 4096
    assert bins.max() + 1 <= 1.01 * lengths.sum() / 4096 + 1


# ------------------------------------------------------------------------------------------ documents that are repeated

REPEATED = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 4)


@given(REPEATED, st.data())
def test_rows_hold_the_tokens_of_the_documents_in_that_order(lengths, data):
    order = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20)))
    tokens, boundaries = np.arange(sum(lengths)), borders_of(lengths)
    expected = np.concatenate([tokens[boundaries[each] : boundaries[each + 1]] for each in order])
    if len(expected) < 4:
        return
    rows = pack_in_order(boundaries, order, 4)
    packed = [[tokens[start:stop] for start, stop in rows.row(index)] for index in range(len(rows))]
    assert np.concatenate([part for row in packed for part in row]).tolist() == expected[: 4 * len(rows)].tolist()
    for start, stop in rows.segments:  # each in one document
        assert np.searchsorted(boundaries, start, side="right") == np.searchsorted(boundaries, stop, side="left")
    assert rows.dropped_tokens == len(expected) - 4 * len(rows)


@given(REPEATED, st.sampled_from([1.0, 1.3, 2.0, 2.5, 4.0]))
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
    for part in ("2 of 4 documents", "3 tokens", "69.2%", "87.1%"):
        assert part in caplog.text


@given(REPEATED)
def test_the_order_of_the_corpus_changes_nothing(lengths):
    boundaries = borders_of(lengths)
    plain = pack_documents(boundaries, 4)
    ordered = pack_in_order(boundaries, np.arange(len(lengths)), 4)
    assert np.array_equal(plain.segments, ordered.segments)
    assert np.array_equal(plain.row_boundaries, ordered.row_boundaries)
