import functools
import gzip
import http.server
import json
import threading
from types import SimpleNamespace

import fsspec
import jsonargparse
import pyarrow
import pyarrow.parquet
import pytest
import yaml
import zstandard
from lightning import LightningDataModule

from datamodules import TextDataModule
from datamodules.sources.hub import HubDataset

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


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """A web server and the folder that it serves."""
    folder = tmp_path_factory.mktemp("web")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.func.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}", folder
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", [".txt", ".txt.gz", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_the_same_documents_from_everywhere(kind, place, tmp_path, word_tokenizer):
    folder = f"memory:/{tmp_path}" if place == "memory" else str(tmp_path)
    write_corpus(folder, kind)
    source = TextDataModule(word_tokenizer, train=folder).source("train")
    assert [document.text for document in source] == TEXTS


@pytest.mark.filterwarnings("ignore:The server of these .* reports neither checksums")
@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.zst", ".parquet"])
def test_files_on_the_web(kind, web, word_tokenizer):
    address, folder = web
    write_corpus(folder, kind)
    source = TextDataModule(word_tokenizer, train=f"{address}/x{kind}").source("train")
    assert [document.text for document in source] == TEXTS
    assert (
        TextDataModule(word_tokenizer, train=f"{address}/x{kind}").source("train").fingerprint() == source.fingerprint()
    )


def ready(module, stage="fit"):
    module.trainer = SimpleNamespace(
        global_rank=0, world_size=1, distributed_sampler_kwargs=None, state=SimpleNamespace(fn=stage)
    )
    module.prepare_data()
    module.setup(stage)
    return module


@pytest.mark.filterwarnings("ignore:The server of these .* reports neither checksums")
def test_training_and_validation_end_to_end(tmp_path, word_tokenizer):
    write(f"memory:/{tmp_path}/train/x.jsonl.gz", gzip.compress(json_lines()))
    write(f"memory:/{tmp_path}/val.jsonl", json_lines(["g h"]))
    paths = {"train": f"memory:/{tmp_path}/train", "validation": f"memory:/{tmp_path}/*.jsonl"}
    options = {"name_field": "id", "sequence_length": 3, "cache_dir": str(tmp_path / "cache")}
    module = ready(TextDataModule(word_tokenizer, **paths, **options))
    rows = sorted(batch["input_ids"][0].tolist() for batch in module.train_dataloader())
    assert rows == [[1, 2, 3], [4, 0, 5], [6, 7, 0]]
    assert [(batch["names"], batch["text"]) for batch in module.val_dataloader()] == [(["n0"], ["g h"])]


def test_holdout(tmp_path, word_tokenizer):
    texts = [f"a {'b ' * number}" for number in range(100)]
    write(tmp_path / "x.jsonl", json_lines(texts))
    module = TextDataModule(word_tokenizer, train=str(tmp_path / "x.jsonl"), holdout=5)
    splits = [{document.text for document in module.source(split)} for split in ("train", "validation", "test")]
    assert sorted(set().union(*splits)) == sorted(texts)
    assert sum(map(len, splits)) == 100
    assert 40 < len(splits[0]) < 80


def test_hub_datasets_and_what_is_asked_of_them(word_tokenizer):
    options = {"text_field": "body", "name_field": "id", "where": ("lang", "en"), "revision": "v1"}
    module = TextDataModule(word_tokenizer, train="owner/name", validation="other/name", **options)
    expected = ("body", ("id",), ("lang", "en"), "v1")
    assert module.source("train") == HubDataset("owner/name", "train", *expected)
    assert module.source("validation") == HubDataset("other/name", "validation", *expected)
    held_out = TextDataModule(word_tokenizer, train="owner/name", holdout=9)
    assert held_out.source("validation").source == HubDataset("owner/name", "train")


def test_what_makes_no_sense_is_refused(tmp_path, word_tokenizer):
    module = functools.partial(TextDataModule, word_tokenizer)
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(ValueError, match="`holdout` must be at least 3"):
        module(train=str(tmp_path / "x.jsonl"), holdout=2).source("train")
    (tmp_path / "x.jsonl").unlink()
    for more in ({"validation": "y"}, {"test": "y"}, {"train": None}):
        with pytest.raises(ValueError, match="set `train`, and remove"):
            module(**{"train": "x", "holdout": 5, **more})
    with pytest.raises(ValueError, match="no validation documents: set `validation`, or a `holdout`"):
        module(train="x").source("validation")
    assert module(validation="x").source("train") is None
    write_corpus(tmp_path, ".txt")
    with pytest.raises(ValueError, match=r"`where` = \('a', 'b'\) needs documents with fields"):
        module(train=str(tmp_path), where=("a", "b")).source("train")
    write_corpus(tmp_path, ".jsonl")
    with pytest.raises(ValueError, match=r"different kinds, such as 0\.txt and x\.jsonl"):
        module(train=str(tmp_path)).source("train")
    with pytest.raises(FileNotFoundError, match="not a local file or folder"):
        module(train=str(tmp_path / "none.jsonl")).source("train").fingerprint()


def test_yaml():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    arguments = {
        "tokenizer": "owner/model",
        "train": "s3://bucket/*.parquet",
        "where": ["meta.lang", "en"],
        "holdout": 50,
    }
    config = {"data": {"class_path": "datamodules.TextDataModule", "init_args": {**arguments, "sequence_length": 64}}}
    module = parser.instantiate(parser.parse_string(yaml.safe_dump(config))).data
    assert (module.where, module.holdout, module.sequence_length) == (("meta.lang", "en"), 50, 64)
