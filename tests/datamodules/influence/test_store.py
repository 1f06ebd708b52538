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


def test_a_damaged_or_missing_store_is_refused(tmp_path, complete):
    with pytest.raises(ValueError, match=r"There are no token weights in '.*none'\. Run `longce influence`"):
        InfluenceStore(tmp_path / "none")
    (complete / WEIGHTS).write_bytes(b"12")
    with pytest.raises(ValueError, match="damaged: 2 of 36 bytes"):
        InfluenceStore(complete)
    (complete / HEADER).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        InfluenceStore(complete)
    (complete / HEADER).write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="format 1"):
        InfluenceStore(complete)


def test_rows_of_another_kind_are_refused(complete):
    store = InfluenceStore(complete)
    store.check({"sequence_length": LENGTH, "isolate_documents": True})
    with pytest.raises(ValueError, match=r"`sequence_length` = 4, not 8\. Run `longce influence`"):
        store.check({"sequence_length": 8})
    with pytest.raises(ValueError, match="`isolate_documents` = True, not False"):
        store.check({"isolate_documents": False})
    with pytest.raises(ValueError, match="other training text, or another tokenizer"):
        store.check({"token_store": "b"})
    with pytest.raises(ValueError, match="differently packed sequences"):
        store.check({"packing": "b"})


def test_the_identity_sees_the_packing(tmp_path, rows):
    store = SimpleNamespace(folder=tmp_path / "text")
    one = PackedRowDataset(store, rows).identity()
    assert one == PackedRowDataset(store, pack_documents(np.array([0, 3, 9, 18]), LENGTH)).identity()
    assert one["token_store"] == "text"
    assert (
        one["packing"] != PackedRowDataset(store, pack_documents(np.array([0, 2, 9, 18]), LENGTH)).identity()["packing"]
    )
