import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from datamodules.packing.packing import pack_documents
from datamodules.packing.sequences import PackedRowDataset, collate_examples, collate_rows, make_row
from lightning_modules.batch import IGNORE_INDEX as NO
from lightning_modules.models.loading.config import ModelConfig
from lightning_modules.models.loading.load import load_backbone
from tests.conftest import tiny_model


class Store:
    tokens = np.arange(10, 20, dtype=np.uint16)
    document_boundaries = np.array([0, 3, 9, 10])
    prompt_spans = None

    def __init__(self):
        self.manifest = {"crc32": {}}

    def read(self, start, stop):
        return self.tokens[start:stop]


class Prompts(Store):
    prompt_spans = np.array([[0, 2], [3, 6], [7, 8]])  # the second document is a chat of two turns


def dataset(sequence_length, packing="concat", store=Store, **kwargs):
    rows = pack_documents(Store.document_boundaries, sequence_length, packing)
    return PackedRowDataset(store(), rows, **kwargs)


def lists(row):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()}


def test_rows_of_isolated_documents_written_out():
    assert {dataset(3)[0][name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    rows = [lists(row) for row in map(dataset(5).__getitem__, range(len(dataset(5))))]
    assert rows == [
        {
            "input_ids": [10, 11, 12, 13, 14],
            "labels": [NO, 11, 12, NO, 14],
            "position_ids": [0, 1, 2, 0, 1],
            "document_boundaries": [0, 3, 5],
        },
        {
            "input_ids": [15, 16, 17, 18, 19],
            "labels": [NO, 16, 17, 18, NO],  # the cut document goes on; a document of one token is not scored
            "position_ids": [0, 1, 2, 3, 0],
            "document_boundaries": [0, 4, 5],
        },
    ]


def test_plain_concatenation_written_out():
    assert lists(dataset(5, isolate_documents=False)[0]) == {
        "input_ids": [10, 11, 12, 13, 14],
        "labels": [NO, 11, 12, 13, 14],
        "position_ids": [0, 1, 2, 3, 4],
        "document_boundaries": [0, 5],
    }


def test_shorter_rows_are_padded_behind_their_last_border():
    def row(length):
        offsets = torch.arange(1, 2 * length + 1).view(length, 2)
        return {**make_row(np.arange(1, length + 1), np.array([length])), "text": "t", "offsets": offsets, "name": "n"}

    batch = collate_rows([row(3), row(2)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert batch["labels"].tolist() == [[NO, 2, 3], [NO, 2, NO]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["offsets"].tolist() == [[[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4], [0, 0]]]
    assert batch["document_boundaries"] == [[0, 3], [0, 2]]
    assert (batch["text"], batch["names"]) == (["t", "t"], ["n", "n"])


class Influence:
    values = np.arange(10, dtype=np.float16)


def test_a_row_that_is_not_full_is_padded_behind_its_last_border():
    rows = dataset(5, "best_fit", influence=Influence())
    assert [lists(row) for row in map(rows.__getitem__, range(len(rows)))] == [
        {
            "input_ids": [10, 11, 12, 18, 19],
            "labels": [NO, 11, 12, NO, NO],  # the rest of the second document, and the third
            "position_ids": [0, 1, 2, 0, 0],
            "document_boundaries": [0, 3, 4, 5],
            "influence": [0, 1, 2, 8, 9],
        },
        {
            "input_ids": [13, 14, 15, 16, 17],
            "labels": [NO, 14, 15, 16, 17],
            "position_ids": [0, 1, 2, 3, 4],
            "document_boundaries": [0, 5],
            "influence": [3, 4, 5, 6, 7],
        },
    ]
    padded = dataset(8, "best_fit", influence=Influence())
    assert lists(padded[1]) == {
        "input_ids": [13, 14, 15, 16, 17, 18, 19, 0],
        "labels": [NO, 14, 15, 16, 17, 18, NO, NO],
        "position_ids": [0, 1, 2, 3, 4, 5, 0, 0],
        "document_boundaries": [0, 6, 7],
        "influence": [3, 4, 5, 6, 7, 8, 9, 0],
    }
    assert padded[0]["input_ids"].tolist() == [10, 11, 12, 0, 0, 0, 0, 0]
    assert dataset(8, "best_fit", isolate_documents=False)[1]["document_boundaries"] == [0, 7]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "chunk"])
@pytest.mark.parametrize("sequence_length", [2, 3, 6])
@pytest.mark.parametrize("isolate", [True, False])
def test_prompts_are_not_scored_wherever_rows_cut_them(packing, sequence_length, isolate):
    prompts = {10, 11, 13, 14, 15, 17}
    settings = {"packing": packing, "store": Prompts, "isolate_documents": isolate}
    with_loss, without = (dataset(sequence_length, loss_on_prompt=loss, **settings) for loss in (True, False))
    assert len(without) > 0
    for one, other in zip(map(with_loss.__getitem__, range(len(without))), without, strict=True):
        expected = [NO if token in prompts else label for token, label in zip(*tokens_and_labels(one), strict=True)]
        assert other["labels"].tolist() == expected
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert one["document_boundaries"] == other["document_boundaries"]


def tokens_and_labels(row):
    return row["input_ids"].tolist(), row["labels"].tolist()


@pytest.mark.parametrize("layout", ["right", "left", "packed", "lists"])
def test_examples_have_the_loss_that_transformers_computes_of_each_text(layout, tmp_path):
    model = tiny_model("llama", 50, seed=3)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(50, (length,), generator=generator).tolist() for length in (12, 7)]
    labels = [[NO] * 5 + texts[0][5:], texts[1]]  # the first text has a prompt
    rows = [{"input_ids": ids, "labels": kept, "other": "x"} for ids, kept in zip(texts, labels, strict=True)]
    if layout == "packed":
        rows = DataCollatorWithFlattening()([{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows])
    elif layout != "lists":
        fill = {"input_ids": [0] * 5, "labels": [NO] * 5, "attention_mask": [0] * 5}
        short = {"input_ids": texts[1], "labels": labels[1], "attention_mask": [1] * 7}
        short = {name: fill[name] + short[name] if layout == "left" else short[name] + fill[name] for name in fill}
        rows = [{**rows[0], "attention_mask": [1] * 12}, short]
        rows = {name: torch.tensor([row[name] for row in rows]) for name in fill}
    batch = collate_examples(rows)
    assert batch["document_boundaries"] == ([[0, 12, 19]] if layout == "packed" else [[0, 12], [0, 7]])
    actual = -load_backbone(ModelConfig(str(tmp_path)))(batch).sum()
    expected = sum(
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([kept])).loss * (torch.tensor(kept[1:]) != NO).sum()
        for ids, kept in zip(texts, labels, strict=True)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("example", "named"),
    [
        ({"input_ids": [1, 2, 3], "labels": [2, 3, NO]}, "`labels`"),
        ({"text": "not tokenized"}, "`input_ids`"),
        ({"input_ids": [0, 0], "attention_mask": [0, 0]}, "`input_ids`"),
        ({"input_ids": [5, 6, 7], "position_ids": [9, 10, 11]}, "start at 0 .* got 9"),
    ],
)
def test_examples_that_cannot_be_trained_on_are_refused(example, named):
    with pytest.raises(ValueError, match=named):
        collate_examples([example])


class OnDevice(torch.Tensor):
    """A tensor that, like one on an accelerator, is no array before it is copied."""

    def __array__(self, *_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("batched", [True, False])
def test_examples_may_be_on_an_accelerator(batched):
    rows = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    rows["labels"] = [[5, NO, 7], [8, 9, NO]]
    expected = collate_examples({name: torch.tensor(values) for name, values in rows.items()})
    given = {name: torch.tensor(values).as_subclass(OnDevice) for name, values in rows.items()}
    if not batched:
        given = [{name: values[row] for name, values in given.items()} for row in range(2)]
    found = collate_examples(given)
    assert found["document_boundaries"] == expected["document_boundaries"]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(found[name], expected[name])
        assert type(found[name]) is torch.Tensor


def test_packed_examples_may_be_padded_on_the_left_and_have_documents_of_one_token():
    padded = {"input_ids": [0, 0, 7, 8, 9], "attention_mask": [0, 0, 1, 1, 1], "position_ids": [1, 1, 0, 0, 1]}
    batch = collate_examples([padded])
    assert batch["document_boundaries"] == [[0, 1, 3]]
    assert batch["position_ids"].tolist() == [[0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, -100, 9]]
