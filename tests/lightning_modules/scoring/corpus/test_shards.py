"""Shards of scores in folders, here and behind an fsspec URL."""

import fsspec
import pyarrow
import pytest

from lightning_modules.scoring.corpus.shards import SUCCESS, ScoreShards


@pytest.fixture(params=["local", "file", "memory"])
def place(request, tmp_path):
    return {"local": "", "file": "file://", "memory": "memory:/"}[request.param] + str(tmp_path / "scores")


def table(*rows):
    return pyarrow.table({"file": [file for file, _ in rows], "row": [row for _, row in rows]})


def header(**settings):
    return {"settings": {"stride": 4, **settings}, "files": {"a": "1"}}


def test_files_of_a_folder(place):
    shards = ScoreShards(place)
    assert shards.names() == []
    shards.check_writable()
    shards.write(table(("a", 1)), header())
    shards.write(table(("b", 3), ("a", 9)), header())
    assert len(shards.names()) == 2
    for hidden in (".building-c.parquet", "_c.parquet"):
        shards._write_file(hidden, b"")
    assert len(shards.names()) == 2
    found = list(shards.read(["file", "row"]))
    assert [name for name, _, _ in found] == shards.names()
    assert [content["settings"] for _, content, _ in found] == [{"stride": 4}] * 2
    assert sorted(row for _, _, rows in found for row in rows["row"].to_pylist()) == [1, 3, 9]
    shards.write_success({"documents": 3})
    assert SUCCESS in shards.entries()
    for _ in range(2):
        shards.remove_success()
    assert SUCCESS not in shards.entries()


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path, monkeypatch):
    shards = ScoreShards(f"memory:/{tmp_path}")
    system = fsspec.filesystem("memory")

    def torn(path, content):
        type(system).pipe_file(system, path, content[:2])
        raise OSError("connection lost")

    monkeypatch.setattr(shards._system, "pipe_file", torn)
    with pytest.raises(OSError, match="connection lost"):
        shards.write(table(("a", 1)), header())
    assert shards.names() == []


def test_files_that_are_no_shards(tmp_path):
    shards = ScoreShards(str(tmp_path))
    shards.write(table(("a", 1)), header())
    (path,) = tmp_path.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"part-.*damaged, delete it"):
        list(shards.read(["row"]))
    pyarrow.parquet.write_table(table(("a", 1)), path)
    with pytest.raises(ValueError, match="does not contain document scores"):
        list(shards.read(["row"]))
