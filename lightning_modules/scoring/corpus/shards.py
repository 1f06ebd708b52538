"""Parquet files with scores of documents, which one process writes and reads again to resume."""

import io
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

from lightning_modules.utilities.files import BUILDING, write_atomically

FORMAT = "longce-document-scores-2"
SUCCESS = "_SUCCESS.json"
"""File with total counts, written when all documents are scored."""

PER_TOKEN = ("lsd", "lcl", "token_starts", "token_ends")
"""Columns with a list of one value per token."""

HEADER = b"longce"
"""Key of the header in the metadata of a shard."""
_READER_THREADS = 16  # reading thousands of small remote files is mostly waiting
_MAX_NAMED = 5  # settings, in a message


class ScoreShards:
    """Folder of ``part-*.parquet`` files, whose metadata records the settings of their scores.

    It is at an fsspec URL, or at the local path ``local``, and need not exist. Files are written atomically.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        is_local = "://" not in path or path.startswith("file://")
        self.local = Path(path.removeprefix("file://")).expanduser() if is_local else None
        try:
            self._system, self._root = fsspec.url_to_fs(path if self.local is None else str(self.local))
        except (ImportError, ValueError) as error:
            raise ValueError(f"Cannot write to '{path}': {error}. Correct the URL, or install the package.") from error

    def __str__(self) -> str:
        return self.path

    def check_writable(self) -> None:
        """Create the folder if needed, and raise a ``ValueError`` if it is not writable."""
        probe = f"{self._root}/{BUILDING}{uuid.uuid4().hex}"
        try:
            self._system.makedirs(self._root, exist_ok=True)
            self._system.pipe_file(probe, b"")  # only writing shows whether one may write
            self._system.rm_file(probe)
        except Exception as error:  # each file system raises its own errors
            raise ValueError(
                f"Cannot write to '{self.path}' ({error}). Check the URL and your access rights."
            ) from error

    def entries(self) -> list[str]:
        """Return the names of all files and folders in the folder, in order."""
        self._system.invalidate_cache()
        try:
            return sorted(PurePosixPath(path).name for path in self._system.ls(self._root, detail=False))
        except FileNotFoundError:
            return []

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return [name for name in self.entries() if name.endswith(".parquet") and name[0] not in "._"]

    def write(self, table: pyarrow.Table, header: Mapping[str, Any]) -> None:
        """Write a shard with a unique name; its columns must include ``file`` and ``row``.

        The header has ``settings`` and ``files``, the states of the files by name.
        """
        content = json.dumps({"format": FORMAT, **header}).encode()
        sink = pyarrow.BufferOutputStream()
        table = table.replace_schema_metadata({HEADER: content})
        pyarrow.parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
        name = f"part-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}.parquet"
        self._write_file(name, sink.getvalue())

    def read(self, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], pyarrow.Table]]:
        """Yield name, header and columns of each shard, in order; raise a ``ValueError`` for a damaged one."""
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            yield from pool.map(partial(self._read_shard, columns=columns), self.names())

    def write_success(self, content: Mapping[str, Any]) -> None:
        """Write ``_SUCCESS.json``."""
        self._write_file(SUCCESS, (json.dumps(content, indent=2) + "\n").encode())

    def remove_success(self) -> None:
        """Remove ``_SUCCESS.json`` if it exists."""
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{SUCCESS}")

    def _write_file(self, name: str, content: bytes) -> None:
        if self.local is not None:
            write_atomically(self.local / name, content)
            return
        # Object stores write whole objects, but others, such as SFTP, show a file while it grows.
        temporary = f"{self._root}/{BUILDING}{name}@{uuid.uuid4().hex}"
        self._system.pipe_file(temporary, content)
        self._system.mv(temporary, f"{self._root}/{name}")

    def _read_shard(self, name: str, columns: Sequence[str]) -> tuple[str, dict[str, Any], pyarrow.Table]:
        try:
            with io.BufferedReader(self._system.open(f"{self._root}/{name}", "rb")) as stream:
                file = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
                header = json.loads((file.schema_arrow.metadata or {}).get(HEADER, b"{}"))
                if header.get("format") != FORMAT:
                    raise ValueError(
                        f"'{self}/{name}' does not contain document scores ({FORMAT}). Use another folder."
                    )
                return name, header, file.read(columns=list(columns), use_threads=False).replace_schema_metadata()
        except (pyarrow.ArrowException, EOFError, OSError) as error:  # an OSError also for a page's checksum
            raise ValueError(
                f"'{self}/{name}' cannot be read ({error}). If it is damaged, delete it: its documents are then scored"
                " again."
            ) from error


def check_settings(then: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise a ``ValueError`` if existing scores (``place``) were computed with other settings."""
    current = json.loads(json.dumps(now))  # tuples become lists, as in the file
    names = sorted(name for name in {*then, *current} if then.get(name) != current.get(name))
    if names:
        changes = "; ".join(
            f"`{name}` was {then.get(name)!r} and is {current.get(name)!r}" for name in names[:_MAX_NAMED]
        )
        raise ValueError(f"The scores in '{place}' were made with other settings: {changes}. Use another folder.")
