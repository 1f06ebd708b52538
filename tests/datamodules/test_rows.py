import numpy as np
import pytest
import torch

from datamodules.packing import pack_documents
from datamodules.rows import PackedRowDataset, collate_rows, make_row
from lightning_modules.batch import IGNORE_INDEX as NO


class Store:
    tokens = np.arange(10, 20, dtype=np.uint16)
    document_borders = np.array([0, 3, 9, 10])

    def read(self, start, stop):
        return self.tokens[start:stop]


def dataset(sequence_length, **kwargs):
    return PackedRowDataset(Store(), pack_documents(Store.document_borders, sequence_length), **kwargs)


def lists(row):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def test_rows_of_isolated_documents_written_out():
    rows = [lists(row) for row in map(dataset(5).__getitem__, range(2))]
    assert rows == [
        {
            "input_ids": [10, 11, 12, 13, 14],
            "labels": [NO, 11, 12, NO, 14],
            "position_ids": [0, 1, 2, 0, 1],
            "document_borders": [0, 3, 5],
        },
        {
            "input_ids": [15, 16, 17, 18, 19],
            "labels": [NO, 16, 17, 18, NO],  # the cut document goes on; a document of one token is not scored
            "position_ids": [0, 1, 2, 3, 0],
            "document_borders": [0, 4, 5],
        },
    ]


def test_plain_concatenation_written_out():
    assert lists(dataset(5, isolate_documents=False)[0]) == {
        "input_ids": [10, 11, 12, 13, 14],
        "labels": [NO, 11, 12, 13, 14],
        "position_ids": [0, 1, 2, 3, 4],
        "document_borders": [0, 5],
    }


def test_rows_are_int64_and_as_many_as_packed():
    assert len(dataset(3)) == 3
    assert {dataset(3)[0][name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}


def test_batch_of_equal_rows():
    batch = collate_rows([dataset(5)[0], dataset(5)[1]])
    assert batch["input_ids"].shape == (2, 5)
    assert batch["document_borders"] == [[0, 3, 5], [0, 4, 5]]
    assert "text" not in batch


def test_shorter_rows_are_padded_behind_their_last_border():
    def row(length):
        offsets = torch.arange(1, 2 * length + 1).view(length, 2)
        return {**make_row(np.arange(1, length + 1), np.array([length])), "text": "t", "offsets": offsets, "name": "n"}

    batch = collate_rows([row(3), row(2)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch["labels"].tolist() == [[NO, 2, 3], [NO, 2, NO]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["offsets"].tolist() == [[[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [0, 0]]]
    assert batch["document_borders"] == [[0, 3], [0, 2]]
    assert (batch["text"], batch["names"]) == (["t", "t"], ["n", "n"])


@pytest.mark.parametrize("isolate", [True, False])
def test_labels_are_the_tokens_wherever_there_is_a_context(isolate):
    for row in map(dataset(2, isolate_documents=isolate).__getitem__, range(5)):
        scored = row["position_ids"] > 0
        assert (row["labels"][scored] == row["input_ids"][scored]).all()
        assert (row["labels"][~scored] == NO).all()
