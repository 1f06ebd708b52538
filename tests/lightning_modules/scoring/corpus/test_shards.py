"""Shards of scores in folders, here and behind an fsspec URL."""

import re

import fsspec
import numpy as np
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
    assert (shards.sizes(), shards.check_success()) == ({}, False)
    shards.check_writable()
    shards.write(table(("a", 1)), header(), 0)
    (name,) = shards.sizes()
    for hidden in (".building-c.parquet", "_c.parquet"):
        shards._write_file(hidden, b"")
    assert list(shards.sizes()) == [name]
    shards.write_success({"documents": 1})
    assert shards.check_success()
    shards._write_file(name, b"less")
    with pytest.raises(ValueError, match=f"{name} has another size"):
        shards.check_success()
    for _ in range(2):
        shards.remove_success()
    assert not shards.check_success()
    shards._write_file(SUCCESS, b"[]")
    with pytest.raises(ValueError, match=rf"{SUCCESS}' is damaged"):
        shards.check_success()


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path, monkeypatch):
    shards = ScoreShards(f"memory:/{tmp_path}")
    system = fsspec.filesystem("memory")

    def torn(path, content):
        type(system).pipe_file(system, path, content[:2])
        raise OSError("connection lost")

    monkeypatch.setattr(shards._system, "pipe_file", torn)
    with pytest.raises(OSError, match="connection lost"):
        shards.write(table(("a", 1)), header(), 0)
    assert shards.sizes() == {}


def test_rows_that_are_there(place):
    shards = ScoreShards(place)
    empty = shards.existing_scores()
    assert (empty.rows, empty.settings, empty.versions) == ({}, {}, {})
    shards.write(table(("b", 3), ("a", 9), ("b", 1)), header(), 0)
    shards.write(table(("a", 2), ("b", 2)), {**header(), "files": {"a": "1", "b": "7"}}, 1)
    written = shards.existing_scores()
    assert {file: rows.tolist() for file, rows in written.rows.items()} == {"a": [2, 9], "b": [1, 2, 3]}
    assert written.rows["a"].dtype == np.int64
    assert written.versions == {"a": "1", "b": "7"}
    assert written.settings == {"stride": 4}
    assert {name.split("-")[1] for name in shards.sizes()} == {"00000", "00001"}
    assert sum(len(part) for _, _, part in shards.read(["row"])) == 5


def test_shards_that_do_not_go_together(tmp_path):
    shards = ScoreShards(str(tmp_path))
    shards.write(table(("a", 1)), header(), 0)
    shards.write(table(("a", 1)), header(), 0)
    shards.write(table(("a", 3)), header(), 0)
    with pytest.raises(ValueError, match=r"1 shard\(s\) repeat rows of other shards") as caught:
        shards.existing_scores()
    (double,) = re.findall(r"part-\S+\.parquet", str(caught.value))
    (tmp_path / double).unlink()
    assert shards.existing_scores().rows["a"].tolist() == [1, 3], "each row once"
    for other, message in (
        ({**header(), "files": {"a": "2"}}, "two versions"),
        (header(stride=5), r"`stride` was . and is ."),
    ):
        before = set(shards.sizes())
        shards.write(table(("a", 2)), other, 0)
        with pytest.raises(ValueError, match=message):
            shards.existing_scores()
        (added,) = set(shards.sizes()) - before
        (tmp_path / added).unlink()


def test_scores_of_an_earlier_version_are_named(tmp_path):
    (tmp_path / SUCCESS).write_text('{"contents": {"part-0.parquet": [1, 2, "a"]}}')
    with pytest.raises(ValueError, match=r"longce 0\.1\.0"):
        ScoreShards(str(tmp_path)).check_success()


def test_files_that_are_no_shards(tmp_path):
    shards = ScoreShards(str(tmp_path))
    shards.write(table(("a", 1)), header(), 0)
    (path,) = tmp_path.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"part-.*damaged, delete it"):
        shards.existing_scores()
    pyarrow.parquet.write_table(table(("a", 1)), path)
    with pytest.raises(ValueError, match="does not contain document scores"):
        shards.existing_scores()
