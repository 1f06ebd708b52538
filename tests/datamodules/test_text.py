import gzip
import json

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from datamodules import TextDataModule
from datamodules.sources.content import Content
from datamodules.sources.hub import HubDataset
from tests.support.trainers import seen_trainer

TEXTS = ["a b c d", "e f g", "h"]


def write(path, content):
    with fsspec.open(path, "wb", auto_mkdir=True) as file:
        file.write(content)


def json_lines(texts=TEXTS):
    return b"".join(json.dumps({"text": text, "id": f"n{i}"}).encode() + b"\n" for i, text in enumerate(texts))


def write_corpus(folder, kind):
    """`TEXTS` as one kind of files."""
    if kind.startswith(".txt"):
        for number, text in enumerate(TEXTS):
            write(f"{folder}/{number}{kind}", PACK[kind.removeprefix(".txt")](text.encode()))
    elif kind == ".parquet":
        with fsspec.open(f"{folder}/x.parquet", "wb", auto_mkdir=True) as file:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": text} for text in TEXTS]), file)
    else:
        write(f"{folder}/x{kind}", PACK["." + kind.rpartition(".")[2] if kind.count(".") > 1 else ""](json_lines()))


PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".json", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_the_same_documents_from_everywhere(kind, place, tmp_path, word_tokenizer):
    folder = f"memory:/{tmp_path}" if place == "memory" else str(tmp_path)
    write_corpus(folder, kind)
    source = TextDataModule(word_tokenizer, train=folder).source("train")
    assert [document.text for document in source] == TEXTS


@pytest.mark.filterwarnings("ignore:The server of these .* reports neither checksums")
def test_training_and_validation_end_to_end(tmp_path, word_tokenizer):
    write(f"memory:/{tmp_path}/train/x.jsonl.gz", gzip.compress(json_lines()))
    write(f"memory:/{tmp_path}/val.jsonl", json_lines(["g h"]))
    paths = {"train": f"memory:/{tmp_path}/train", "validation": f"memory:/{tmp_path}/*.jsonl"}
    options = {"name_field": "id", "sequence_length": 3, "cache_dir": str(tmp_path / "cache")}
    module = TextDataModule(word_tokenizer, **paths, **options)
    module.trainer = seen_trainer()
    module.prepare_data()
    module.setup("fit")
    rows = sorted(batch["input_ids"][0].tolist() for batch in module.train_dataloader())
    assert rows == [[1, 2, 3], [4, 0, 5], [6, 7, 0]]
    assert [(batch["names"], batch["text"]) for batch in module.val_dataloader()] == [(["n0"], ["g h"])]


def test_hub_datasets_and_what_is_asked_of_them(word_tokenizer):
    options = {"text_field": "body", "name_field": "id", "where": ("lang", "en"), "revision": "v1"}
    module = TextDataModule(word_tokenizer, train="owner/name", validation="other/name", **options)
    expected = (Content(("body",)), ("id",), ("lang", "en"), "v1")
    assert module.source("train") == HubDataset("owner/name", "train", *expected)
    assert module.source("validation") == HubDataset("other/name", "validation", *expected)
    held_out = TextDataModule(word_tokenizer, train="owner/name", holdout=9)
    assert held_out.source("validation").source == HubDataset("owner/name", "train")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"train": "x", "holdout": 5, "validation": "y"}, ValueError, "`holdout`"),
        ({"train": "x", "holdout": 5, "test": "y"}, ValueError, "`holdout`"),
        ({"train": None, "holdout": 5}, ValueError, "`holdout`"),
        ({"train": "{}/*.txt", "where": ("a", "b")}, ValueError, "`where`"),
        ({"train": "{}"}, ValueError, "x.jsonl"),
        ({"train": "{}/none.jsonl"}, FileNotFoundError, "none.jsonl"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, word_tokenizer, options, error, named):
    for kind in (".txt", ".jsonl"):  # of which a source can have one
        write_corpus(tmp_path, kind)

    def refused(train, **options):
        train = train and train.format(tmp_path)
        TextDataModule(word_tokenizer, train=train, **options).source("train").fingerprint()

    with pytest.raises(error, match=named):
        refused(**options)
