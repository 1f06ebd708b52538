"""Files of a corpus, on this machine or behind an fsspec URL: found, told apart and opened in one way."""

import glob
import io
import json
import logging
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import fsspec
from fsspec.core import url_to_fs

TEXT = (".txt", ".txt.gz", ".txt.zst")
JSON_LINES = tuple(kind + packing for kind in (".jsonl", ".json") for packing in ("", ".gz", ".zst"))
"""Endings of JSON-lines files; corpora such as the Pile call them .json, too."""
PARQUET = (".parquet",)

# By what file systems tell one version of a file from the next, the surest first.
_VERSIONS = (
    *("etag", "ETag", "blob_id", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "created"),
)
_READ_AHEAD = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """A file of an fsspec file system, with what sources use of `pathlib.Path`.

    Args:
        system: Where it is.
        path: Its path there.
        info: What the file system says of it.
    """

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
        """The bytes, fetched as they are read.

        Raises:
            ValueError: If they cannot be had.
        """
        try:
            # A file system does not survive a fork, as of a loader's worker, but its pickle makes it anew there.
            system = pickle.loads(pickle.dumps(self.system))
            return cast(BinaryIO, io.BufferedReader(system.open(self.path, mode), _READ_AHEAD))
        except OSError as error:
            raise ValueError(f"{self}: cannot be read ({error}). Check the network and your access rights.") from error


File = Path | RemoteFile


def is_url(path: str) -> bool:
    """Whether a path is an fsspec URL such as ``s3://bucket/folder``, ``hf://datasets/owner/name`` or ``https://..``."""
    return "://" in path


def find_files(path: str) -> tuple[File, ...]:
    """The files that a path stands for, in the order of their paths.

    Args:
        path: A file, a folder (searched to any depth; names with a dot or underscore in front are passed over) or a
            pattern with ``*`` or ``**``; local or an fsspec URL.

    Raises:
        FileNotFoundError: If there is none of a known kind.
        ValueError: If the file system is not known, needs a package that is missing, or cannot be reached.
    """
    found = _remote_files(path) if is_url(path) else _local_files(path)
    files = tuple(file for file in found if file.name.endswith((*TEXT, *JSON_LINES, *PARQUET)))
    if not files:
        raise FileNotFoundError(
            f"No file to read at '{path}': looked for {', '.join((*TEXT, *JSON_LINES, *PARQUET))}. Correct the path."
        )
    return files


def files_fingerprint(files: Iterable[File]) -> str:
    """Hash of names, sizes and modification times (or what a remote file system has in their place).

    It tells an edit of many gigabytes without reading them.
    """
    return sha256(json.dumps(sorted(_stamp(file) for file in files)).encode()).hexdigest()


def file_version(file: File) -> str:
    """Size and version of a file, in one text."""
    _, size, version = _stamp(file)
    return f"{size} {version}"


def file_size(file: File) -> int | None:
    """Bytes of the file as it is stored; None if the server does not say."""
    return file.stat().st_size if isinstance(file, Path) else file.info.get("size")


def _stamp(file: File) -> tuple[str, int, int | str]:
    """Name, size and version; -1 and an empty text for what is not known."""
    if isinstance(file, Path):
        return (file.name, file.stat().st_size, file.stat().st_mtime_ns)
    version = next((str(file.info[key]) for key in _VERSIONS if file.info.get(key)), "")
    size = file_size(file)
    if not version:
        _log.warning("%s: its server tells no version or time, so that an edit of equal size is not noticed.", file)
    return (file.name, -1 if size is None else size, version)


def _local_files(path: str) -> list[Path]:
    root = Path(path).expanduser()
    if root.is_dir():
        found = [file for file in _files_below(root, frozenset()) if not _hidden(file.relative_to(root))]
    else:
        found = [Path(name) for name in glob.glob(str(root), recursive=True)] if "*" in path else [root]
    return sorted(file for file in found if file.is_file())


def _files_below(folder: Path, parents: frozenset[Path]) -> Iterator[Path]:
    """All files in a folder, in linked folders, too, as patterns find them; a link to a folder around it is an end."""
    real = folder.resolve()
    if real in parents:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files_below(path, parents | {real})
        else:
            yield path


def _remote_files(path: str) -> list[RemoteFile]:
    try:
        system, root = url_to_fs(path)
        infos = _listed(system, root)
    except ImportError as error:
        raise ValueError(f"'{path}' needs a package that is not installed: {error} (by `pip install`).") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is nothing at '{path}'. Correct the path, or check your access rights."
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"'{path}' cannot be reached ({error}). Check the address, the network and your rights."
        ) from error
    return [RemoteFile(system, name, infos[name]) for name in sorted(infos) if infos[name]["type"] == "file"]


def _listed(system: fsspec.AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Path and description of the file, of all files of the folder, or of what fits the pattern: one request each."""
    if "*" in root:
        return system.glob(root, detail=True)
    info = system.info(root)
    if info["type"] == "file":
        return {root: info}
    found = system.find(root, detail=True)
    return {name: info for name, info in found.items() if not _hidden(PurePosixPath(name.removeprefix(root)))}


def _hidden(path: PurePosixPath | Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
