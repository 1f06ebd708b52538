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
"""Endings of JSON-lines files; corpora such as the Pile also call them .json."""
PARQUET = (".parquet",)

# Reports of file systems: checksums identify a file's content, entity tags and times a version at its address.
_CHECKSUMS = ("blob_id", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TAGS = ("etag", "ETag", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created")
_MD5 = re.compile(r'"?[0-9a-fA-F]{32,}(-\d+)?"?')  # as object stores make tags; web servers make them of size and time
_READ_AHEAD = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file of an fsspec file system, with what sources use of `pathlib.Path`."""

    system: fsspec.AbstractFileSystem
    path: str
    info: dict[str, Any] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    @property
    def name(self) -> str:
        """Last part of the path, without the query of a web address."""
        return PurePosixPath(re.sub(r"[?#].*", "", self.path) if self.path.startswith("http") else self.path).name

    @property
    def suffix(self) -> str:
        """Last ending of the name, such as ``".gz"``."""
        return PurePosixPath(self.name).suffix

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Open the file, whose bytes are fetched as they are read; a ``ValueError`` if they cannot be."""
        try:
            return cast(BinaryIO, io.BufferedReader(self._reconnect().open(self.path, mode), _READ_AHEAD))
        except OSError as error:
            raise ValueError(f"{self}: cannot be read ({error}). Check the network and your access rights.") from error

    @functools.cached_property
    def identity(self) -> str:
        """Text that identifies the content; computed once, because it may take a request or a download."""
        info = self.info
        if not any(info.get(key) for key in (*_CHECKSUMS, *_TAGS, *_TIMES)):  # lists of files may have fewer details
            with suppress(OSError):
                info = {**info, **self._reconnect().info(self.path)}

        def first(keys: Iterable[str]) -> str | None:
            return next((f"{key} {info[key]}" for key in keys if info.get(key)), None)

        tag, time = first(_TAGS), first(_TIMES)
        checksum = first(_CHECKSUMS) or (tag if tag and _MD5.fullmatch(tag.partition(" ")[2]) else None)
        if checksum is not None:
            return f"{checksum} {file_size(self)}"
        if tag is None and time is None:
            with self.open("rb") as stream:
                return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"  # type: ignore[arg-type]
        if tag is None:
            warnings.warn(
                f"Files of {self.system.protocol} report neither checksum nor entity tag here, so that an edit that"
                " keeps size and time is not noticed. Download them, or clear the cache after such an edit.",
                stacklevel=2,
            )
        return combined_hash([str(self), file_size(self), tag or time])

    def _reconnect(self) -> fsspec.AbstractFileSystem:
        """The file system, which does not survive the fork of a loader's worker, but its pickle does."""
        return pickle.loads(pickle.dumps(self.system))


File = Path | RemoteFile


def is_url(path: str) -> bool:
    """Return whether a path is an fsspec URL, such as ``s3://bucket/folder``."""
    return "://" in path


def find_files(path: str) -> tuple[File, ...]:
    """Find the files of known kinds at a path, in the order of their paths.

    It is a file, a folder (searched to any depth, except names that begin with a dot or underscore) or a pattern with
    ``*`` or ``**``; local or an fsspec URL.
    """
    found = _remote_files(path) if is_url(path) else _local_files(path)
    files = tuple(file for file in found if file.name.endswith((*TEXT, *JSON_LINES, *PARQUET)))
    if not files:
        raise FileNotFoundError(
            f"No file to read at '{path}': looked for {', '.join((*TEXT, *JSON_LINES, *PARQUET))}. Correct the path."
        )
    return files


def files_fingerprint(files: Iterable[File]) -> str:
    """Compute a hash of the content of files in their order, wherever they are and whatever they are called."""
    files = tuple(files)
    endings = [file.suffix for file in files]  # which decide how the content is read
    return combined_hash(list(zip(endings, file_identities(files), strict=True)))


def file_identities(files: Iterable[File]) -> list[str]:
    """Compute for each file a text that identifies its content.

    For a local file it is the SHA-256 of its bytes. For one elsewhere it is the checksum that the file system reports;
    else address, size and entity tag; else address, size and time, with a warning, as an edit may keep those; else the
    SHA-256 of its bytes, which are fetched, once for each `RemoteFile`.
    """
    files = tuple(files)
    hashes = iter(file_hashes(file for file in files if isinstance(file, Path)))
    return [f"sha256:{next(hashes)}" if isinstance(file, Path) else file.identity for file in files]


def file_size(file: File) -> int | None:
    """Return the bytes of the file as it is stored; None if the server does not report it."""
    return file.stat().st_size if isinstance(file, Path) else file.info.get("size")


def _local_files(path: str) -> list[Path]:
    root = Path(path).expanduser()
    if root.is_dir():
        found = [file for file in _files_below(root, frozenset()) if not _is_hidden(file.relative_to(root))]
    else:
        found = [Path(name) for name in glob.glob(str(root), recursive=True)] if "*" in path else [root]
    return sorted(file for file in found if file.is_file())


def _files_below(folder: Path, parents: frozenset[Path]) -> Iterator[Path]:
    """Yield all files in a folder and in linked folders, as patterns find them; links to a parent are skipped."""
    real = folder.resolve()
    for path in () if real in parents else folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, parents | {real})
        else:
            yield path


def _remote_files(path: str) -> Sequence[File]:
    try:
        system, root = url_to_fs(path)
        infos = _list_files(system, root)
    except ImportError as error:
        raise ValueError(f"'{path}' needs a package that is not installed: {error} (by `pip install`).") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is nothing at '{path}'. Correct the path or check your rights.") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be reached ({error}). Check address, network and your rights.") from error
    if isinstance(system, LocalFileSystem):  # file://
        return _local_files(root)
    return [RemoteFile(system, name, infos[name]) for name in sorted(infos) if infos[name]["type"] == "file"]


def _list_files(system: fsspec.AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """List path and description of the file, of the folder's files, or of matches of the pattern, in one request."""
    if "*" in root:
        return system.glob(root, detail=True)
    info = system.info(root)
    if info["type"] == "file":
        return {root: info}
    found = system.find(root, detail=True)
    return {name: info for name, info in found.items() if not _is_hidden(PurePosixPath(name.removeprefix(root)))}


def _is_hidden(path: PurePosixPath | Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
