"""Weights on the way to disk: where they lie, what survives a kill, and what is not mixed."""

import json
import os
import pickle
import resource
import signal

import numpy as np
import pytest

from datamodules.influence import writer as influence_writer
from datamodules.influence.store import DONE, HEADER, WEIGHTS, InfluenceStore
from datamodules.influence.writer import InfluenceWriter, influence_folder, narrow
from datamodules.packing.packing import PackedRows, pack_documents
from tests.support.forks import call

LENGTH = 4
MADE_FROM = {"sequence_length": LENGTH, "isolate_documents": True, "gamma": 5.0, "evaluator": "a"}


@pytest.fixture
def rows():
    return pack_documents(np.array([0, 3, 9, 18]), LENGTH)  # four rows, the last two tokens are dropped


def weights(number):
    return np.arange(1, LENGTH + 1, dtype=np.float32)[None] / 8 + number


def writer(folder, rows, **changes):
    return InfluenceWriter(folder, {**MADE_FROM, **changes}, rows, tokens=18)


def test_weights_lie_where_their_tokens_do(tmp_path):
    """Rows whose segments are not in the order of the stream, as another packing would make them."""
    segments = np.array([[6, 9], [0, 1], [1, 3], [9, 11]])
    rows = PackedRows(segments, np.array([0, 2, 4]), sequence_length=LENGTH, dropped_tokens=10, truncated_documents=2)
    first = writer(tmp_path / "w", rows)
    first.write([1], np.array([[1.0, 2.0, 3.0, 4.0]], dtype=np.float32))
    with pytest.raises(ValueError, match="incomplete"):
        InfluenceStore(tmp_path / "w")
    first.write([0], np.array([[1.0, 5.0, 0.5, 0.25]], dtype=np.float32))
    store = InfluenceStore(tmp_path / "w")
    assert store.values.tolist() == [0.25, 1, 2, 0, 0, 0, 1, 5, 0.5, 3, 4, 0, 0, 0, 0, 0, 0, 0]
    assert [path.name for path in sorted((tmp_path / "w").iterdir())] == [DONE, HEADER, WEIGHTS]
    # 4 of 8 tokens are the first of a segment and not scored; here they count as weight 1 each
    sums = {"weight_mean": (16.75 - 4) / 4, "weight_above_1": 4 / 4, "weight_at_cap": 1 / 4}
    assert first.statistics() == pytest.approx(sums)
    assert np.array_equal(pickle.loads(pickle.dumps(store)).values, store.values)


def test_first_tokens_are_not_at_a_cap_of_1(tmp_path, rows):
    one = writer(tmp_path / "w", rows, gamma=1.0)
    values = [[1, 0.5, 0.5, 1], [1, 1, 0.5, 0.5], [1, 1, 0.5, 1], [1, 0.5, 1, 0.5]]
    one.write(range(4), np.array(values, dtype=np.float32))
    # Of the 9 weights of 1, 6 are of the first tokens of segments; 10 tokens are scored.
    assert one.statistics()["weight_at_cap"] == pytest.approx(3 / 10)


def test_a_second_run_goes_on_with_the_rows_that_are_missing(tmp_path, rows):
    one, other = writer(tmp_path / "w", rows), writer(tmp_path / "w", rows)
    one.write([0, 3], np.concatenate([weights(0), weights(3)]))
    other.write([2], weights(2))
    again = writer(tmp_path / "w", rows)
    assert again.remaining().tolist() == [1]
    again.write([1], weights(1))
    stored = InfluenceStore(tmp_path / "w").values
    assert np.array_equal(stored[:16], np.concatenate([weights(number)[0] for number in range(4)]).astype("<f2"))
    assert writer(tmp_path / "w", rows).remaining().tolist() == []


def test_a_row_whose_weights_are_not_on_the_disk_is_not_taken_for_done(tmp_path, rows, monkeypatch):
    first = writer(tmp_path / "w", rows)
    first.write([0], weights(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.write([1], weights(1))
    assert writer(tmp_path / "w", rows).remaining().tolist() == [1, 2, 3]


def test_a_run_that_was_killed_before_it_had_a_header_starts_again(tmp_path, rows, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(influence_writer, "write_atomically", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer(tmp_path / "w", rows)
    assert writer(tmp_path / "w", rows).remaining().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cap", [1.0, 1.3, 5.0, 7.7])
def test_float16_keeps_what_is_at_the_cap_and_rounds_the_rest(cap):
    exact = np.append(np.linspace(0, cap, 999, dtype=np.float32), np.float32(cap))
    stored = narrow(exact, cap).astype(np.float64)
    assert np.minimum(stored, cap)[exact >= np.float32(cap)] == pytest.approx(cap, rel=0)
    np.testing.assert_allclose(stored, exact, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize(
    ("folder", "changes", "named"),
    [
        ("w", {"evaluator": "b"}, "`evaluator` = a, not b"),
        ("v", {"gamma": 1e6}, "`gamma`"),
    ],
)
def test_other_weights_are_not_mixed_in(tmp_path, rows, folder, changes, named):
    writer(tmp_path / "w", rows)
    with pytest.raises(ValueError, match=named):
        writer(tmp_path / folder, rows, **changes)
    assert influence_folder(tmp_path, MADE_FROM) != influence_folder(tmp_path, {**MADE_FROM, "evaluator": "b"})


def test_weights_of_an_earlier_format_are_refused_with_a_remedy(tmp_path, rows):
    writer(tmp_path / "w", rows)
    header = tmp_path / "w" / HEADER
    header.write_text(json.dumps({**json.loads(header.read_text()), "format": 2}))
    with pytest.raises(ValueError, match=r"format 4\. Delete the folder.*`--output`"):
        writer(tmp_path / "w", rows)


def write_on_a_full_disk(folder):
    other = writer(folder, pack_documents(np.array([0, 3, 9, 18]), LENGTH))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (11, 11))  # the second row has the bytes 8 to 15
    with pytest.raises(OSError, match="File too large"):
        other.write([1], weights(1))


@pytest.mark.slow
def test_a_disk_that_is_full_within_a_row_is_noticed(tmp_path, rows):
    """Of a file on a full disk, a raw write stores a part of the bytes and raises nothing."""
    first = writer(tmp_path / "w", rows)
    path = tmp_path / "w" / WEIGHTS
    call(write_on_a_full_disk, tmp_path / "w")
    assert path.stat().st_size == 36
    assert first.remaining().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [WEIGHTS, DONE])
@pytest.mark.parametrize("content", [None, b""])
def test_files_of_another_size_are_refused(tmp_path, rows, name, content):
    writer(tmp_path / "w", rows).write([0], weights(0))
    replace_file(tmp_path / "w" / name, content)
    with pytest.raises(ValueError, match=f"{name}' has 0 of"):
        writer(tmp_path / "w", rows)


@pytest.mark.parametrize(
    ("name", "content"), [(WEIGHTS, b"12"), (DONE, b""), (HEADER, b"{"), (HEADER, b'{"format": 1}'), (HEADER, None)]
)
def test_a_damaged_or_missing_store_is_not_read(tmp_path, rows, name, content):
    writer(tmp_path / "w", rows).write(range(4), np.ones((4, LENGTH), dtype=np.float32))
    replace_file(tmp_path / "w" / name, content)
    with pytest.raises(ValueError, match=f"{tmp_path}"):
        InfluenceStore(tmp_path / "w")


def replace_file(path, content):
    """Write other content, or remove the file."""
    path.unlink()
    if content is not None:
        path.write_bytes(content)
