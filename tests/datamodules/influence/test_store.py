import json
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules.influence.store import HEADER, WEIGHTS, InfluenceStore
from datamodules.influence.writer import InfluenceWriter
from datamodules.packing.packing import pack_documents
from datamodules.packing.sequences import PackedRowDataset

LENGTH = 4
MADE_FROM = {"sequence_length": LENGTH, "isolate_documents": True, "gamma": 5.0, "token_store": "a", "packing": "a"}


@pytest.fixture
def rows():
    return pack_documents(np.array([0, 3, 9, 18]), LENGTH)  # four rows, the last two tokens are dropped


@pytest.fixture
def complete(tmp_path, rows):
    writer = InfluenceWriter(tmp_path / "w", MADE_FROM, rows, tokens=18)
    writer.write(range(4), np.ones((4, LENGTH), dtype=np.float32))
    writer.finish()
    return tmp_path / "w"


@pytest.mark.parametrize(
    ("file", "content"),
    [(WEIGHTS, b"12"), (HEADER, b"{"), (HEADER, json.dumps({"format": 0}).encode()), (HEADER, None)],
)
def test_a_damaged_or_missing_store_is_refused(complete, file, content):
    (complete / file).unlink() if content is None else (complete / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{complete}"):
        InfluenceStore(complete)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"sequence_length": 8}, "`sequence_length` = 4, not 8"),
        ({"isolate_documents": False}, "`isolate_documents`"),
        ({"token_store": "b"}, "text"),
        ({"packing": "b"}, "packed"),
    ],
)
def test_rows_of_another_kind_are_refused(complete, other, named):
    store = InfluenceStore(complete)
    store.check({"sequence_length": LENGTH, "isolate_documents": True})
    with pytest.raises(ValueError, match=named):
        store.check(other)


def test_the_identity_sees_the_packing(tmp_path, rows):
    store = SimpleNamespace(folder=tmp_path / "text")
    one = PackedRowDataset(store, rows).identity()
    assert one == PackedRowDataset(store, pack_documents(np.array([0, 3, 9, 18]), LENGTH)).identity()
    assert one["token_store"] == "text"
    assert (
        one["packing"] != PackedRowDataset(store, pack_documents(np.array([0, 2, 9, 18]), LENGTH)).identity()["packing"]
    )
