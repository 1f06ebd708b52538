import os
from pathlib import Path

import datasets
import pytest

from datamodules.sources.documents import Document
from datamodules.sources.hub import HubDataset


@pytest.fixture
def parquet_folder(tmp_path):
    """A clone of a hub dataset: ``data/<split>-00000-of-00001.parquet``."""
    for split in ("train", "test"):
        rows = [
            {"title": "A", "text": f"a of {split}", "meta": {"pile_set_name": "ArXiv"}},
            {"title": None, "text": f"b of {split}", "meta": {"pile_set_name": "Books"}},
        ]
        path = tmp_path / "clone" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(tmp_path / "clone")


def test_reads_a_split_of_parquet_files(parquet_folder):
    documents = list(HubDataset(parquet_folder, "test", name_columns=("title",)))
    assert documents == [Document("A", "a of test"), Document("test:1", "b of test")]


@pytest.mark.parametrize("path", ["/nowhere/pg19", "./pg19", "data/books/pg19", "~/pg19", None])
def test_a_path_that_is_no_dataset_is_refused_without_asking_the_hub(path, monkeypatch, tmp_path):
    (tmp_path / "book.txt").write_text("`datasets` would make a document of each line")
    path = path or str(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", None)
    with pytest.raises(FileNotFoundError, match=path):
        HubDataset(path, "train").fingerprint()


def test_an_edited_local_file_is_read_again_though_its_time_is_the_old_one(parquet_folder):
    before = HubDataset(parquet_folder, "train")
    assert next(iter(before)).text == "a of train"
    first = before.fingerprint()
    path = Path(parquet_folder, "data", "train-00000-of-00001.parquet")
    times = path.stat()
    rows = datasets.Dataset.from_parquet(str(path)).to_list()
    datasets.Dataset.from_list([{**row, "text": row["text"].replace("of", "in")} for row in rows]).to_parquet(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = HubDataset(parquet_folder, "train")
    assert [document.text for document in after] == ["a in train", "b in train"]
    assert after.fingerprint() != first
    assert after.fingerprint() == HubDataset(parquet_folder, "train").fingerprint()
    assert after.fingerprint() != HubDataset(parquet_folder, "test").fingerprint()
