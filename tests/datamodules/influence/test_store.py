import json

import numpy as np
import pytest

from datamodules.influence.store import DONE, HEADER, WEIGHTS, InfluenceStore
from datamodules.influence.writer import InfluenceWriter
from datamodules.packing.packing import pack_documents

LENGTH = 4
MADE_FROM = {"sequence_length": LENGTH, "isolate_documents": True, "gamma": 5.0, "token_store": "a", "packing": "a"}


@pytest.fixture
def rows():
    return pack_documents(np.array([0, 3, 9, 18]), LENGTH)  # four rows, the last two tokens are dropped


@pytest.fixture
def complete(tmp_path, rows):
    writer = InfluenceWriter(tmp_path / "w", MADE_FROM, rows, tokens=18)
    writer.write(range(4), np.ones((4, LENGTH), dtype=np.float32))
    return tmp_path / "w"


@pytest.mark.parametrize(
    ("file", "content"),
    [(WEIGHTS, b"12"), (DONE, b""), (HEADER, b"{"), (HEADER, json.dumps({"format": 1}).encode()), (HEADER, None)],
)
def test_a_damaged_or_missing_store_is_refused(complete, file, content):
    (complete / file).unlink() if content is None else (complete / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{complete}"):
        InfluenceStore(complete)
