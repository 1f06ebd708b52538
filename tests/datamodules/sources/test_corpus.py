"""Documents of a corpus: found, shared out and read."""

import gzip
import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.sources import records
from datamodules.sources.corpus import CorpusColumns, CorpusFiles, DocumentRef, Part, find_corpus, read_documents
from datamodules.sources.locations import RemoteFile

COLUMNS = CorpusColumns("text", None, ())


def write_parquet(path, rows, group=3, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, **columns}), path, row_group_size=group)


def write_lines(path, *records, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in records)
    path.write_bytes(gzip.compress(lines) if packed else lines)


def all_of(files):
    """Every document by file and row; of a broken one the error."""
    read = chain.from_iterable(files.read(part, lambda _: True) for part in files.parts)
    return {(ref.file, ref.row): ref.error or text for ref, text in read}


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "c" / "web" / "a.parquet", [f"a b {n}" for n in range(8)])  # in groups of three rows
    write_lines(tmp_path / "c" / "b.jsonl", {"text": "a b c"}, b"  ", {"text": "b"})
    write_lines(tmp_path / "c" / "z.json.gz", {"text": "c"}, packed=True)
    (tmp_path / "c" / "t.txt").write_text("a a a")
    return tmp_path / "c"


def test_files_of_all_kinds_are_named_from_the_folder_on(folder):
    found = all_of(find_corpus([str(folder)], COLUMNS))
    assert found == {
        **{("web/a.parquet", row): f"a b {row}" for row in range(8)},
        ("b.jsonl", 0): "a b c",
        ("b.jsonl", 2): "b",
        ("z.json.gz", 0): "c",
        ("t.txt", 0): "a a a",
    }
    for pattern, names in {
        f"{folder}/**/*.parquet": {"web/a.parquet"},
        f"{folder}/web/*": {"a.parquet"},
        f"{folder}/t.txt": {"t.txt"},
    }.items():
        assert set(find_corpus([pattern], COLUMNS).files) == names
    twice = find_corpus([str(folder), f"{folder}/*.txt"], COLUMNS)
    assert len(twice.files) == 4, "a file that is named twice is there once"
    for other in (f"{folder}/web", os.path.relpath(folder)):
        again = find_corpus([str(folder), other], COLUMNS)
        assert again.files == twice.files, "also by a path that would name it differently"
    write_parquet(folder / "other" / "a.parquet", ["x"])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        find_corpus([f"{folder}/web", f"{folder}/other"], COLUMNS)


def test_remote_files_are_named_in_the_same_way(folder, tmp_path):
    root = f"memory:/{tmp_path}/c"
    for path in folder.rglob("*.*"):
        with fsspec.open(f"{root}/{path.relative_to(folder)}", "wb") as stream:
            stream.write(path.read_bytes())
    local, remote = find_corpus([str(folder)], COLUMNS), find_corpus([root], COLUMNS)
    assert all(isinstance(file, RemoteFile) for file in remote.files.values())
    assert all_of(remote) == all_of(local)
    assert set(find_corpus([f"{root}/web/*.parquet"], COLUMNS).files) == {"a.parquet"}


def test_keys_and_columns(tmp_path):
    write_parquet(
        tmp_path / "p" / "a.parquet",
        ["x", "y"],
        id=[7, None],
        year=pyarrow.array([1900, 2000], pyarrow.int16()),
        meta=[{"set": "A"}, None],
    )
    files = find_corpus([str(tmp_path / "p")], CorpusColumns("text", "id", ("year", "meta.set")))
    assert files.column_types == {"year": pyarrow.int16(), "meta.set": pyarrow.string()}
    (first, text), (second, _) = files.read(files.parts[0], lambda _: True)
    assert (first, text) == (DocumentRef("7", "a.parquet", 0, {"year": 1900, "meta.set": "A"}), "x")
    assert second.key == "a.parquet:1"
    assert "no key in 'id'" in second.error
    write_lines(tmp_path / "p" / "b.jsonl", {"text": "z", "id": "q", "year": 3, "meta": {"set": ["B"]}})
    files = find_corpus([str(tmp_path / "p")], CorpusColumns("text", "id", ("year", "meta.set")))
    assert set(files.column_types.values()) == {pyarrow.string()}
    ((ref, _),) = files.read(files.parts[-1], lambda _: True)
    assert ref == DocumentRef("q", "b.jsonl", 0, {"year": "3", "meta.set": '["B"]'})


def test_a_name_with_dots_may_be_that_of_a_column(tmp_path):
    """As `datasets.Dataset.flatten` names the columns of nested fields."""
    columns = CorpusColumns("page.text", "page.id", ("meta.set", "meta.year"))
    table = {"page.text": ["x"], "page.id": ["k"], "meta.set": ["A"], "meta": [{"year": 3}]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    files = find_corpus([str(tmp_path)], columns)
    assert files.column_types == {"meta.set": pyarrow.string(), "meta.year": pyarrow.int64()}
    ((ref, text),) = files.read(files.parts[0], lambda _: True)
    assert (ref, text) == (DocumentRef("k", "a.parquet", 0, {"meta.set": "A", "meta.year": 3}), "x")


@pytest.mark.parametrize("column", ["m.n", "n"])
def test_columns_that_are_missing_or_differ_between_files_are_refused(tmp_path, column):
    write_parquet(tmp_path / "a.parquet", ["x"], n=[1])
    write_parquet(tmp_path / "b.parquet", ["x"], n=["1"])
    with pytest.raises(ValueError, match=f"'{column}'"):
        find_corpus([str(tmp_path)], CorpusColumns("text", None, (column,)))


@pytest.mark.parametrize(
    ("lines", "columns", "named"),
    [
        ([{"content": "x"}, b"{torn", {"content": "y"}], COLUMNS, "'text'"),
        ([{"text": "x", "id": 1}], CorpusColumns("text", "key", ()), "'key'"),
        ([b"[", b"1]"], COLUMNS, "malformed JSON"),
    ],
)
def test_a_file_in_which_all_documents_would_fail_is_refused_at_once(tmp_path, lines, columns, named):
    """A wrong name of a column, and not a million rows with an error."""
    for number in range(70):  # more than there are threads
        write_lines(tmp_path / f"{number:02}.jsonl", b"{torn", {"text": "x", "key": 3})
    write_lines(tmp_path / "07.jsonl", *lines)
    with pytest.raises(ValueError, match=rf"07\.jsonl.*{named}"):
        find_corpus([str(tmp_path)], columns)
    assert len(all_of(find_corpus([str(tmp_path)], columns, check=False))) == 69 * 2 + len(lines)
    write_lines(tmp_path / "07.jsonl")  # nothing fails in an empty file
    find_corpus([str(tmp_path)], columns)
    write_lines(tmp_path / "07.jsonl", *[b"{" + b"x" * 300_000] * 7, {"text": "x", "key": 3})
    assert len(all_of(find_corpus([str(tmp_path)], columns))) == 69 * 2 + 8, "one long document says nothing of others"


def test_the_text_column_of_a_parquet_file_must_be_text(tmp_path):
    write_parquet(tmp_path / "b.parquet", [1, 2])
    with pytest.raises(ValueError, match=r"b\.parquet.*--text_column"):
        find_corpus([str(tmp_path)], COLUMNS)
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary("int32", "string")):
        write_parquet(tmp_path / "b.parquet", pyarrow.array(["x"], kind))
        assert all_of(find_corpus([str(tmp_path)], COLUMNS)) == {("b.parquet", 0): "x"}


def test_keys_and_columns_that_no_table_takes_are_reasons(tmp_path):
    """Half a surrogate pair, which JSON can spell, and durations that Python has not: Arrow refuses the whole shard."""
    write_lines(tmp_path / "a.jsonl", *({"text": "x", "id": key, "s": key} for key in ("fine", "\ud800")))
    for columns in (CorpusColumns("text", "id", ()), CorpusColumns("text", None, ("s",))):
        files = find_corpus([str(tmp_path)], columns)
        (fine, _), (broken, _) = files.read(files.parts[0], lambda _: True)
        assert fine.error is None
        assert "a lone surrogate" in broken.error
        assert broken.key == "a.jsonl:1"
    (tmp_path / "a.jsonl").unlink()
    write_parquet(tmp_path / "b.parquet", ["x"], long=pyarrow.array([2**62], pyarrow.duration("s")))
    files = find_corpus([str(tmp_path)], CorpusColumns("text", None, ("long",)), check=False)
    ((broken, _),) = files.read(files.parts[0], lambda _: True)
    assert "too large" in broken.error
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as stream:
        stream.write("x")
    with pytest.raises(ValueError, match="udcff"):
        find_corpus([str(tmp_path)], COLUMNS)


def test_broken_rows_have_a_reason_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_DOCUMENT", 40)
    lines = [{"text": "fine"}, b"{torn", {"text": 3}, {"title": "x"}, b'"text"', {"text": "b" * 200}, {"text": "last"}]
    write_lines(tmp_path / "a.jsonl", *lines)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    write_parquet(tmp_path / "c.parquet", ["fine", None, "\n"])
    found = all_of(find_corpus([str(tmp_path)], COLUMNS))
    reasons = {("a.jsonl", 1): "JSON", ("a.jsonl", 2): "int", ("a.jsonl", 3): "title", ("a.jsonl", 4): "object"}
    reasons |= {("a.jsonl", 5): "40 bytes", ("b.txt", 0): "UTF-8", ("c.parquet", 1): "'text'"}
    assert all(reason in found.pop(place) for place, reason in reasons.items())
    texts = {("a.jsonl", 0): "fine", ("a.jsonl", 6): "last", ("c.parquet", 0): "fine", ("c.parquet", 2): "\n"}
    assert found == texts


@given(st.lists(st.integers(0, 50), min_size=0, max_size=40), st.integers(1, 9))
@settings(max_examples=30)
def test_together_the_shards_read_each_row_once(rows, shards):
    parts, first = [], 0
    for number, count in enumerate(rows):
        parts.append(Part("a", number, first, count))
        first += count
    files = CorpusFiles({"a": Path("a")}, tuple(parts), COLUMNS, {})
    taken = Counter()
    for shard in range(shards):
        for share in files.shares(shard, shards):
            own = [row for row in range(share.part.first, share.part.first + share.part.rows) if row in share]
            assert share.count() == len(own)
            taken.update((share.part, row) for row in own)
    expected = {(part, row): 1 for part in parts for row in range(part.first, part.first + part.rows)}
    assert taken == Counter(expected)


def test_lines_are_not_counted_and_are_shared_too():
    files = CorpusFiles({"a": Path("a")}, (Part("a", None, 0, None),), COLUMNS, {})
    shares = [share for shard in range(3) for share in files.shares(shard, 3)]
    assert [share.count() for share in shares] == [None] * 3
    assert all(sum(row in share for share in shares) == 1 for row in range(10))


def test_documents_are_read_again_by_their_rows(folder):
    found = read_documents([str(folder)], COLUMNS, {"web/a.parquet": [1, 6], "b.jsonl": [2]})
    assert {(ref.file, ref.row): text for ref, text in found} == {
        ("web/a.parquet", 1): "a b 1",
        ("web/a.parquet", 6): "a b 6",
        ("b.jsonl", 2): "b",
    }
    with pytest.raises(ValueError, match=r"gone\.txt"):
        list(read_documents([str(folder)], COLUMNS, {"gone.txt": [0]}))
