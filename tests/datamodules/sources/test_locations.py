import hashlib
import os
import pickle
import re

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datamodules.sources.documents import RecordFiles, text_bytes
from datamodules.sources.locations import RemoteFile, file_identities, file_size, files_fingerprint, find_files

NAMES = [
    "b.jsonl",
    "deep/down/a.jsonl.zst",
    "a.jsonl",
    ".hidden/x.jsonl",
    "_temporary/x.jsonl",
    "_SUCCESS",
    "README.md",
]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """Address of a folder that holds `NAMES`."""
    folder = str(tmp_path) if request.param == "local" else f"memory:/{tmp_path}"
    for name in NAMES:
        with fsspec.open(f"{folder}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b'{"text": "one"}\n')
    return folder


def found(path, root):
    return [str(file).partition(root.removeprefix("memory:/"))[2].lstrip("/") for file in find_files(path)]


def test_files_of_a_folder_a_pattern_and_a_path(root):
    assert found(root, root) == ["a.jsonl", "b.jsonl", "deep/down/a.jsonl.zst"]
    assert found(f"{root}/*.jsonl", root) == ["a.jsonl", "b.jsonl"]
    assert found(f"{root}/**/*.zst", root) == ["deep/down/a.jsonl.zst"]
    assert found(f"{root}/b.jsonl", root) == ["b.jsonl"]
    if "://" not in root:
        assert find_files(f"file://{root}") == find_files(root)
    queried = RemoteFile(fsspec.filesystem("http"), "https://host/x/a.jsonl.zst?download=true", {})
    assert (queried.name, queried.suffix) == ("a.jsonl.zst", ".zst")
    assert remote("/what?.jsonl").name == "what?.jsonl"


def test_linked_folders_are_searched_too_and_circles_end(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c.txt").write_text("three")
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_text("one")
    (root / "deep/linked").symlink_to(tmp_path / "elsewhere")
    (root / "deep/circle").symlink_to(root)
    assert found(str(root), str(root)) == ["a.txt", "deep/linked/c.txt"]


@pytest.mark.parametrize("name", ["none", "README.md", "*.txt", "none/*.jsonl"])
def test_nothing_to_read_is_named(root, name):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(name)):
        find_files(f"{root}/{name}")


@pytest.mark.filterwarnings("ignore:The server of these .* reports neither checksums")
def test_fingerprint_sees_edits(root):
    before = files_fingerprint(find_files(root))
    assert files_fingerprint(find_files(root)) == before
    with fsspec.open(f"{root}/a.jsonl", "wb") as file:
        file.write(b'{"text": "two"}\n')
    if "://" not in root:
        os.utime(f"{root}/a.jsonl", (1, 1))
    assert files_fingerprint(find_files(root)) != before


def remote(name, **info):
    return RemoteFile(fsspec.filesystem("memory"), name, info)


MD5 = '"0123456789abcdef0123456789abcdef-12"'


@pytest.mark.parametrize("info", [{"ETag": MD5}, {"md5Hash": "x"}, {"blob_id": "x", "ETag": '"y"'}])
def test_a_checksum_counts_wherever_the_file_is(info, caplog):
    one = file_identities([remote("/a", size=3, mtime=1, **info)])
    assert file_identities([remote("/b/c", size=3, mtime=2, **info)]) == one
    (key, value), *_ = info.items()
    assert file_identities([remote("/a", size=3, mtime=1, **{**info, key: value.replace("x", "z")[::-1]})]) != one
    assert not caplog.records


def test_an_entity_tag_counts_at_its_address(caplog):
    tags = [
        file_identities([remote(name, size=size, ETag=tag, mtime=time)])[0]
        for name, size, tag, time in (
            ("/a", 3, '"5f-3"', 1),
            ("/a", 3, '"5f-3"', 2),
            ("/b", 3, '"5f-3"', 1),  # a web server makes tags of size and time
            ("/a", 4, '"5f-3"', 1),
            ("/a", 3, '"60-3"', 1),
        )
    ]
    assert tags[0] == tags[1]
    assert len(set(tags)) == 4
    assert not caplog.records


def test_a_server_that_reports_times_only_is_named():
    files = [remote("/a", size=3, mtime=1), remote("/a", size=3, mtime=2), remote("/b", size=3, mtime=1)]
    with pytest.warns(UserWarning, match="memory"):
        assert len(set(file_identities(files))) == 3


def test_a_server_that_reports_nothing_is_read(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: {"type": "file"})
    file = remote("/a.txt")
    found = set()
    for text in (b"one", b"two", b"one"):
        file = remote("/a.txt")
        file.system.pipe_file(file.path, text)
        found.update(file_identities([file, file]))
        with monkeypatch.context() as patch:  # it is fetched once, though each shard asks for its identity
            patch.setattr(RemoteFile, "open", None)
            found.update(file_identities([pickle.loads(pickle.dumps(file))]))
    assert found == {f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (b"one", b"two")}
    assert file_size(file) is None
    assert text_bytes(RecordFiles((file,))) is None


@pytest.mark.parametrize("path", ["nosuch://bucket/x.jsonl", "http://localhost:9/x.jsonl", "s3://bucket/x.jsonl"])
def test_what_cannot_be_reached_is_named(path):
    with pytest.raises((ValueError, FileNotFoundError), match=path):
        find_files(path)
