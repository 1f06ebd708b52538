import os
import tracemalloc
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from datamodules.sources.content import Content, Document
from datamodules.sources.documents import RecordFiles
from datamodules.sources.locations import find_files

ROWS = [
    {"text": "one", "meta": {"set": "A", "n": 1}, "title": "One", "other": b"x"},
    {"text": "two", "meta": {"set": "B", "n": 2}, "title": None, "other": b"x"},
    {"text": "three", "meta": None, "title": "Three", "other": b"x"},
]


def source(folder, rows=ROWS, **options):
    with fsspec.open(f"{folder}/data.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return RecordFiles(find_files(f"{folder}/*.parquet"), **options)


@pytest.mark.parametrize("remote", [False, True])
def test_rows_are_documents(tmp_path, remote):
    folder = f"memory:/{tmp_path}" if remote else str(tmp_path)
    assert [document.text for document in source(folder, where=("meta.set", "B"))] == ["two"]
    assert [document.text for document in source(folder, where=("meta.n", 1))] == ["one"]
    documents = list(source(folder, name_fields=("title",)))
    assert documents == [Document("One", "one"), Document("data.parquet:1", "two"), Document("Three", "three")]


def test_bad_rows_and_files_are_named(tmp_path):
    for options, named in (({"content": Content(("body",))}, "'body'"), ({"where": ("meta.set", "C")}, "'C'")):
        with pytest.raises(ValueError, match=rf"data\.parquet.*{named}|{named}.*data\.parquet"):
            list(source(tmp_path, **options))
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    bytes_as_text = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": bytes_as_text}), tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet:0"):
        list(RecordFiles(find_files(str(tmp_path))))
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"data\.parquet"):
        list(RecordFiles(find_files(str(tmp_path))))


def test_memory_is_bounded_by_the_pages_not_by_the_file(tmp_path):
    """One row group of 20 MB in pages of about 1 MB, read with less than half of it."""
    book = "".join(chr(97 + (i * i * 7 + i // 3) % 26) for i in range(100_000))
    rows = [{"text": f"{number} {book}"} for number in range(200)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "books.parquet", use_dictionary=False, write_batch_size=4
    )
    del rows
    before = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    largest = max(
        pyarrow.total_allocated_bytes() - before for _ in RecordFiles(find_files(str(tmp_path / "books.parquet")))
    )
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest + python < 10e6


def test_a_server_without_range_requests_is_named(tmp_path):
    source(tmp_path, [{"text": "one", "other": os.urandom(12 << 20)}])  # more than is fetched at once
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        files = find_files(f"http://127.0.0.1:{server.server_port}/data.parquet")
        with pytest.raises(ValueError, match=r"data\.parquet.*range"):
            list(RecordFiles(files))
        server.shutdown()
