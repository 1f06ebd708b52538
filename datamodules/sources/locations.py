"""Find, identify and open files of a corpus, local or at an fsspec URL."""

import functools
import glob
import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_modules.utilities.identity import combined_hash, file_hashes

TEXT = (".txt", ".txt.gz", ".txt.zst")
JSON_LINES = tuple(kind + packing for kind in (".jsonl", ".json") for packing in ("", ".gz", ".zst"))
"""Endings of JSON-lines files, which corpora such as the Pile also call .json."""
PARQUET = (".parquet",)

# Keys of file systems' metadata. A checksum identifies the content; an entity tag or a time only a version at a URL.
_CHECKSUMS = ("blob_id", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TAGS = ("etag", "ETag", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created")
_MD5 = re.compile(r'"?[0-9a-fA-F]{32,}(-\d+)?"?')  # tags of object stores; web servers make tags of size and time
_READ_AHEAD = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """File of an fsspec file system, with the part of `pathlib.Path` that sources use."""

    system: fsspec.AbstractFileSystem
    path: str
    info: dict[str, Any] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """Last component of the path, without the query of a URL."""
        path = self.path
        if path.startswith("http"):
            path = re.sub(r"[?#].*", "", path)
        return PurePosixPath(path).name

    @property
    def suffix(self) -> str:
        """Suffix of the name, such as ``".gz"``."""
        return PurePosixPath(self.name).suffix

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Open the file, whose bytes are downloaded as they are read; raise a ``ValueError`` if that fails."""
        try:
            return cast(BinaryIO, io.BufferedReader(self._reconnect().open(self.path, mode), _READ_AHEAD))
        except OSError as error:
            raise ValueError(f"{self}: cannot be read ({error}). Check the network and your access rights.") from error

    @functools.cached_property
    def identity(self) -> str:
        """Text that identifies the content; computed once, because it may take a request or a download."""
        info = self.info
        if not any(info.get(key) for key in (*_CHECKSUMS, *_TAGS, *_TIMES)):  # folder listings may have less metadata
            with suppress(OSError):
                info = {**info, **self._reconnect().info(self.path)}

        def first(keys: Iterable[str]) -> str | None:
            return next((f"{key} {info[key]}" for key in keys if info.get(key)), None)

        tag = first(_TAGS)
        time = first(_TIMES)
        checksum = first(_CHECKSUMS)
        if checksum is None and tag is not None and _MD5.fullmatch(tag.partition(" ")[2]):
            checksum = tag
        if checksum is not None:
            return f"{checksum} {file_size(self)}"
        if tag is None and time is None:
            with self.open("rb") as stream:
                return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"  # type: ignore[arg-type]
        if tag is None:
            warnings.warn(
                f"The server of these {self.system.protocol} files reports neither checksums nor entity tags, so an"
                " edit that keeps size and time goes unnoticed. Download the files, or clear the cache after such an"
                " edit.",
                stacklevel=2,
            )
        return combined_hash([str(self), file_size(self), tag or time])

    def _reconnect(self) -> fsspec.AbstractFileSystem:
        """Return a copy of the file system: connections do not survive the fork of a loader worker, pickles do."""
        return pickle.loads(pickle.dumps(self.system))


File = Path | RemoteFile


def is_url(path: str) -> bool:
    """Return whether a path is an fsspec URL, such as ``s3://bucket/folder``."""
    return "://" in path


def fixed_folder(path: str) -> str:
    """Return the folder before the first wildcard of a pattern, or a path without wildcards."""
    before, wildcard, _ = path.partition("*")
    if not wildcard:
        return path
    return before.rpartition("/")[0] or "."


def find_files(path: str) -> tuple[File, ...]:
    """Return the files of supported kinds at a path, in the order of their paths.

    The path is a file, a folder (searched recursively, except names that begin with a dot or underscore) or a glob
    pattern with ``*`` or ``**``; local or an fsspec URL.
    """
    found = _remote_files(path) if is_url(path) else _local_files(path)
    files = tuple(file for file in found if file.name.endswith((*TEXT, *JSON_LINES, *PARQUET)))
    if not files:
        raise FileNotFoundError(
            f"No file at '{path}' ends in {', '.join((*TEXT, *JSON_LINES, *PARQUET))}. Correct the path."
        )
    return files


def files_fingerprint(files: Iterable[File]) -> str:
    """Hash the content of files in their order, regardless of their paths."""
    files = tuple(files)
    endings = [file.suffix for file in files]  # they decide how the content is read
    return combined_hash(list(zip(endings, file_identities(files), strict=True)))


def file_identities(files: Iterable[File]) -> list[str]:
    """Return for each file a text that identifies its content.

    For a local file it is the SHA-256 of its bytes. For a remote file it is the first of these that is available: the
    checksum that the file system reports; URL, size and entity tag; URL, size and time, with a warning, because an edit
    may keep them; the SHA-256 of its bytes, downloaded once for each `RemoteFile`.
    """
    files = tuple(files)
    hashes = iter(file_hashes(file for file in files if isinstance(file, Path)))
    return [f"sha256:{next(hashes)}" if isinstance(file, Path) else file.identity for file in files]


def file_size(file: File) -> int | None:
    """Return the stored size of a file in bytes; None if the server does not report it."""
    if isinstance(file, Path):
        return file.stat().st_size
    return file.info.get("size")


def _local_files(path: str) -> list[Path]:
    root = Path(path).expanduser()
    if root.is_dir():
        found = [file for file in _files_below(root, frozenset()) if not _is_hidden(file.relative_to(root))]
    elif "*" in path:
        found = list(map(Path, glob.glob(str(root), recursive=True)))
    else:
        found = [root]
    return sorted(file for file in found if file.is_file())


def _files_below(folder: Path, parents: frozenset[Path]) -> Iterator[Path]:
    """Yield all files in a folder, including linked folders; links to a parent folder are skipped."""
    real = folder.resolve()
    if real in parents:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, parents | {real})
        else:
            yield path


def _remote_files(path: str) -> Sequence[File]:
    try:
        system, root = url_to_fs(path)
        infos = _list_files(system, root)
    except ImportError as error:
        raise ValueError(
            f"'{path}' needs a package that is not installed: {error}. Install it by `pip install`."
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be reached ({error}). Check URL, network and your access rights.") from error
    if isinstance(system, LocalFileSystem):  # file://
        return _local_files(root)
    return [RemoteFile(system, name, infos[name]) for name in sorted(infos) if infos[name]["type"] == "file"]


def _list_files(system: fsspec.AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Return metadata by path of the file, the folder's files, or the pattern's matches, in one request."""
    if "*" in root:
        return system.glob(root, detail=True)
    info = system.info(root)
    if info["type"] == "file":
        return {root: info}
    found = system.find(root, detail=True)
    return {name: info for name, info in found.items() if not _is_hidden(PurePosixPath(name.removeprefix(root)))}


def _is_hidden(path: PurePosixPath | Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
