import gzip
import json
import os
import tracemalloc
from itertools import islice

import pytest
import zstandard

from datamodules.sources import records
from datamodules.sources.documents import (
    Document,
    NoDocumentError,
    RecordFiles,
    TextFiles,
    text_bytes,
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


def test_folder_without_text_files_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        list(text_folder(tmp_path))


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_empty_documents_are_left_out_and_named(tmp_path, content, caplog):
    for name in ("c", "e", "f", "g"):
        (tmp_path / f"{name}.txt").write_bytes(content)
    with pytest.raises(NoDocumentError, match=r"All of the 4 documents are empty, such as 'c'"):
        list(with_text(text_folder(tmp_path)))
    for name in ("b", "d"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert [document.text for document in with_text(text_folder(tmp_path))] == ["b", "d"]
    assert caplog.messages == ["Skipped 4 empty documents of 6, such as 'c'."]


def test_a_document_too_large_to_hold_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_DOCUMENT", 1 << 20)
    bomb = gzip.compress(b" " * (1 << 26))
    assert len(bomb) < 1 << 17
    for name, read in (("bomb.txt.gz", TextFiles), ("bomb.jsonl.gz", RecordFiles)):
        (tmp_path / name).write_bytes(bomb)
        tracemalloc.start()
        with pytest.raises(ValueError, match=rf"{name}.*: the document exceeds 1,048,576 bytes. Split it"):
            list(read((tmp_path / name,)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
        tracemalloc.stop()


def test_invalid_utf8_in_a_text_file_is_named_with_its_place(tmp_path):
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: byte 3 is not UTF-8"):
        list(text_folder(tmp_path))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_plain_and_compressed(tmp_path, suffix):
    content = b'{"text": "one"}\n\n{"text": "two", "id": 7, "title": "Two"}\n'
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    file = tmp_path / f"data.jsonl{suffix}"
    file.write_bytes(pack(content[:17]) + pack(content[17:]))  # several frames, as the Pile's files have
    expected = [Document(f"data.jsonl{suffix}:1", "one"), Document("7 Two", "two")]
    assert list(RecordFiles((file,), name_fields=("id", "title"))) == expected


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_archive_is_named(tmp_path, suffix):
    file = tmp_path / f"data.jsonl{suffix}"
    file.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=f"data.jsonl{suffix}: the compressed file is damaged"):
        list(RecordFiles((file,)))


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
        with pytest.raises(ValueError, match=r"a.txt.zst: the compressed file is damaged \(Truncated"):
            list(TextFiles((file,)))


def test_filter_on_a_nested_field(tmp_path):
    lines = [{"text": "a", "meta": {"pile_set_name": "ArXiv"}}, {"text": "b", "meta": {"pile_set_name": "Books"}}]
    write_lines(tmp_path / "pile.jsonl", *lines, {"text": 3})
    assert [document.text for document in RecordFiles((tmp_path / "pile.jsonl",), where=ARXIV)] == ["a"]


def test_nothing_left_by_the_filter_is_an_error(tmp_path):
    write_lines(tmp_path / "pile.jsonl", {"text": "b", "meta": "ArXiv"})
    with pytest.raises(ValueError, match=r"No document with meta\.pile_set_name == 'ArXiv' in .*pile\.jsonl"):
        list(RecordFiles((tmp_path / "pile.jsonl",), where=ARXIV))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "malformed JSON"),
        (b'["text"]', "expected a JSON object, got list"),
        (b'{"text": "\xe9"}', "byte 10 is not UTF-8"),
        ({"body": "x"}, r"no text field 'text'; found \['body'\]"),
        ({"text": None}, "the text must be a string, got NoneType"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "Python cannot parse this JSON"),
        (b'{"text": "a", "n": ' + b"[" * 100_000, "Python cannot parse this JSON"),
        ({"text": "half \ud83d pair"}, "character 5 is a lone surrogate"),
    ],
)
def test_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    source = write_lines(tmp_path / "data.jsonl", {"text": "fine"}, line)
    with pytest.raises(ValueError, match=rf"data\.jsonl:2: {message}"):
        list(source)


def test_json_lines_are_read_one_by_one(tmp_path):
    source = write_lines(tmp_path / "data.jsonl", {"text": "one"}, {"text": "two"}, b"broken, but never reached")
    assert [document.text for document in islice(source, 2)] == ["one", "two"]


def test_fingerprint_is_the_content_and_not_the_name_or_time(tmp_path):
    def folder(name, text, mtime, file="a.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        os.utime(tmp_path / name / file, (mtime, mtime))
        return text_folder(tmp_path / name).fingerprint()

    first = folder("one", "text", 1)
    assert folder("moved", "text", 2, "b.txt") == first
    assert folder("edited", "next", 1) != first
    assert folder("longer", "texts", 1) != first


def test_order_of_files_counts(tmp_path):
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        write_lines(file, {"text": file.stem})
    assert RecordFiles(tuple(files)).fingerprint() != RecordFiles(tuple(files[::-1])).fingerprint()
    assert TextFiles(tuple(files)).fingerprint() != TextFiles(tuple(files[::-1])).fingerprint()


def test_fingerprint_sees_what_is_taken(tmp_path):
    write_lines(tmp_path / "data.jsonl", {"text": "one"})
    files = (tmp_path / "data.jsonl",)
    assert RecordFiles(files).fingerprint() != RecordFiles(files, where=ARXIV).fingerprint()


def test_size_of_the_texts_is_told_where_it_is_known(tmp_path):
    (tmp_path / "a.txt").write_text("naïve")
    (tmp_path / "b.txt").write_text("two")
    assert text_bytes(text_folder(tmp_path)) == 6 + 3
    plain = write_lines(tmp_path / "a.jsonl", {"text": "one"})
    assert text_bytes(plain) == len('{"text": "one"}\n')
    assert text_bytes(RecordFiles(plain.files, where=ARXIV)) is None
    assert text_bytes(RecordFiles((tmp_path / "a.jsonl.zst",))) is None


def test_prompt_and_response_are_joined_as_they_are(tmp_path):
    records = [{"q": "Why?\n", "a": "So."}, {"q": "", "a": "Only text"}, {"a": "日本", "q": "🙂"}]
    write_lines(tmp_path / "x.jsonl", *records)
    plain = RecordFiles((tmp_path / "x.jsonl",), ("a",))
    source = RecordFiles((tmp_path / "x.jsonl",), ("a",), prompt_field="q")
    assert list(source) == [
        Document("x.jsonl:1", "Why?\nSo.", 5),
        Document("x.jsonl:2", "Only text", 0),
        Document("x.jsonl:3", "🙂日本", 1),
    ]
    assert [document.text for document in plain] == ["So.", "Only text", "日本"]
    assert source.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
    ("prompt", "message"), [(None, "'q': the text must be a string"), ("\ud83d", "'q': character 0 is a lone surrog")]
)
def test_a_prompt_that_is_no_text_is_named(tmp_path, prompt, message):
    write_lines(tmp_path / "x.jsonl", {"q": prompt, "a": "b"}, {"a": "b"})
    with pytest.raises(ValueError, match=f"x.jsonl:1, {message}"):
        list(RecordFiles((tmp_path / "x.jsonl",), ("a",), prompt_field="q"))
    write_lines(tmp_path / "x.jsonl", {"a": "b"})
    with pytest.raises(ValueError, match=r"x.jsonl:1: no prompt field 'q'; found \['a'\]"):
        list(RecordFiles((tmp_path / "x.jsonl",), ("a",), prompt_field="q"))
