import gzip
import json
import os
import tracemalloc
from itertools import islice

import pytest
import zstandard

from datamodules.sources import records
from datamodules.sources.content import Content, Document
from datamodules.sources.documents import (
    NoDocumentError,
    RecordFiles,
    TextFiles,
    text_folder,
    with_text,
)

ARXIV = ("meta.pile_set_name", "ArXiv")


def write_lines(file, *lines):
    file.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return RecordFiles((file,))


def test_text_folder_in_order_with_titles(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"two\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")  # byte-order mark
    (tmp_path / "notes.md").write_text("not a document")
    assert list(text_folder(tmp_path, {"b": "The B"})) == [Document("a", "one"), Document("b The B", "two\r\n")]


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_empty_documents_are_left_out_and_named(tmp_path, content, caplog):
    for name in ("c", "e"):
        (tmp_path / f"{name}.txt").write_bytes(content)
    with pytest.raises(NoDocumentError, match=r"2 documents .* 'c'"):
        list(with_text(text_folder(tmp_path)))
    for name in ("b", "d"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert [document.text for document in with_text(text_folder(tmp_path))] == ["b", "d"]
    assert caplog.messages == ["Skipped 2 empty documents of 4, such as 'c'."]


def test_a_document_too_large_to_hold_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_DOCUMENT", 1 << 20)
    bomb = gzip.compress(b" " * (1 << 26))
    assert len(bomb) < 1 << 17
    for name, read in (("bomb.txt.gz", TextFiles), ("bomb.jsonl.gz", RecordFiles)):
        (tmp_path / name).write_bytes(bomb)
        tracemalloc.start()
        with pytest.raises(ValueError, match=rf"{name}.* 1,048,576 bytes"):
            list(read((tmp_path / name,)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_plain_and_compressed(tmp_path, suffix):
    content = b'{"text": "one"}\n\n{"text": "two", "id": 7, "title": "Two"}\n'
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    file = tmp_path / f"data.jsonl{suffix}"
    file.write_bytes(pack(content[:17]) + pack(content[17:]))  # several frames, as the Pile's files have
    expected = [Document(f"data.jsonl{suffix}:1", "one"), Document("7 Two", "two")]
    assert list(RecordFiles((file,), name_fields=("id", "title"))) == expected


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd_text_is_whole_or_refused(tmp_path, frames):
    text = "".join(f"line {number} of a text that does not repeat {number**7}\n" for number in range(20_000))
    size = -(-len(text) // frames)
    parts = [text[start : start + size].encode() for start in range(0, len(text), size)]
    skippable = bytes.fromhex("502a4d18") + bytes([3, 0, 0, 0]) + b"abc"
    packed = skippable.join(zstandard.compress(part) for part in parts)
    file = tmp_path / "a.txt.zst"
    file.write_bytes(packed)
    assert [document.text for document in TextFiles((file,))] == [text]
    for end in (len(packed) // 2, len(packed) - 1):
        file.write_bytes(packed[:end])
        with pytest.raises(ValueError, match=r"a\.txt\.zst"):
            list(TextFiles((file,)))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"q": "", "text": "cut', "JSON"),
        (b'["text"]', "list"),
        (b'{"q": "", "text": "\xe9"}', "UTF-8"),
        ({"q": "", "body": "x"}, "'body', 'q'"),
        ({"q": "", "text": None}, "NoneType"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"text": "a", "n": ' + b"[" * 100_000, "JSON"),
        ({"q": "", "text": "half \ud83d pair"}, "character 5"),
        ({"q": None, "text": "b"}, "'q'"),
        ({"q": "\ud83d", "text": "b"}, "'q'.* character 0"),
        ({"text": "b"}, "'q'"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, fault):
    files = write_lines(tmp_path / "data.jsonl", {"q": "", "text": "fine"}, line).files
    with pytest.raises(ValueError, match=rf"data\.jsonl:2.*{fault}"):
        list(RecordFiles(files, Content(prompt="q")))


@pytest.mark.parametrize(
    ("name", "content", "source", "error"),
    [
        ("x.md", b"", lambda folder: text_folder(folder), FileNotFoundError),
        ("a.txt", "café".encode("latin-1"), lambda folder: text_folder(folder), ValueError),
        ("a.txt.gz", b"not an archive", lambda folder: TextFiles((folder / "a.txt.gz",)), ValueError),
        ("a.jsonl.zst", b"not an archive", lambda folder: RecordFiles((folder / "a.jsonl.zst",)), ValueError),
        (
            "a.jsonl",
            b'{"text": "b", "meta": "x"}',
            lambda f: RecordFiles((f / "a.jsonl",), where=ARXIV),
            ValueError,
        ),
    ],
)
def test_files_without_a_document_that_can_be_read_are_named(tmp_path, name, content, source, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=str(tmp_path)):
        list(source(tmp_path))


def test_json_lines_are_read_one_by_one_and_filtered_by_a_nested_field(tmp_path):
    lines = [{"text": "one", "meta": {"pile_set_name": "ArXiv"}}, {"text": 3}, {"text": "two"}]
    source = write_lines(tmp_path / "data.jsonl", *lines[::2], b"broken, but never reached")
    assert [document.text for document in islice(source, 2)] == ["one", "two"]
    filtered = RecordFiles(write_lines(tmp_path / "data.jsonl", *lines).files, where=ARXIV)
    assert [document.text for document in filtered] == ["one"]


def test_fingerprint_is_the_content_and_not_the_name_or_time(tmp_path):
    def folder(name, text, mtime, file="a.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        os.utime(tmp_path / name / file, (mtime, mtime))
        return text_folder(tmp_path / name).fingerprint()

    first = folder("one", "text", 1)
    assert folder("moved", "text", 2, "b.txt") == first
    assert folder("edited", "next", 1) != first
    files = [tmp_path / "one" / "a.txt", tmp_path / "edited" / "a.txt"]
    kinds = [TextFiles(tuple(files)), TextFiles(tuple(files[::-1])), RecordFiles(tuple(files))]
    kinds += [RecordFiles(tuple(files[::-1])), RecordFiles(tuple(files), where=ARXIV)]
    assert len({source.fingerprint() for source in kinds}) == 5, "the order of files, and what is taken of them"


def test_prompt_and_response_are_joined_as_they_are(tmp_path):
    records = [{"q": "Why?\n", "a": "So."}, {"q": "", "a": "Only text"}, {"a": "日本", "q": "🙂"}]
    write_lines(tmp_path / "x.jsonl", *records)
    plain = RecordFiles((tmp_path / "x.jsonl",), Content(("a",)))
    source = RecordFiles((tmp_path / "x.jsonl",), Content(("a",), "q"))
    assert list(source) == [
        Document("x.jsonl:1", "Why?\nSo.", 5),
        Document("x.jsonl:2", "Only text", 0),
        Document("x.jsonl:3", "🙂日本", 1),
    ]
    assert [document.text for document in plain] == ["So.", "Only text", "日本"]
    assert source.fingerprint() != plain.fingerprint()
