"""Scores of documents in parquet files, each written whole by one process, and read again to resume."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from lightning_modules.utilities.output_folder import OutputFolder

FORMAT = "longce-document-scores-1"
SUCCESS = "_SUCCESS.json"
"""File with the counts of all, which is there when all documents are."""

PER_TOKEN = ("lsd", "lcl", "token_starts", "token_ends")
"""Columns of lists with a value for each token."""

_HEADER = b"longce"
_READERS = 16  # threads: of thousands of small remote files, most of the time is waiting
_NAMED = 5  # settings in a message

Rows = dict[str, NDArray[np.int64]]
"""Ascending row numbers by the name of the file."""


class ExistingScores(NamedTuple):
    """Content of a folder of shards."""

    rows: Rows  # rows by file
    versions: dict[str, str]  # content identities of those files when their rows were scored
    settings: dict[str, Any]  # settings of the scores; empty if there are no shards yet
    counts: dict[str, int]  # sums of the shards' counts: documents, failed ones, tokens, ..
    shards: int  # number of files


class ScoreShards:
    """A folder of ``part-*.parquet`` files, each with a header in its metadata that records how its scores were made.

    Args:
        path: A local folder or fsspec URL.
    """

    def __init__(self, path: str) -> None:
        self.folder = OutputFolder(path)

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return self.folder.names(".parquet")

    def existing_scores(self) -> ExistingScores:
        """Read which rows are scored.

        Raises:
            ValueError: If a file is damaged or not a shard, or shards have different settings or share a row.
        """
        shards: dict[str, Rows] = {}
        versions: dict[str, str] = {}
        settings: dict[str, Any] = {}
        counts: dict[str, int] = {}
        names = self.names()
        with ThreadPoolExecutor(_READERS) as pool:
            for name, (header, own) in zip(names, pool.map(self._read_rows, names), strict=True):
                check_settings(header["settings"], settings or header["settings"], f"{self.folder}/{name}")
                settings = header["settings"]
                self._add_versions(versions, header["files"])
                for key, value in header["counts"].items():
                    counts[key] = counts.get(key, 0) + value
                shards[name] = own
        parts: dict[str, list[NDArray[np.int64]]] = {}
        for own in shards.values():
            for file, numbers in own.items():
                parts.setdefault(file, []).append(numbers)
        rows = {file: np.sort(np.concatenate(numbers)) for file, numbers in parts.items()}
        if any((np.diff(numbers) == 0).any() for numbers in rows.values()):
            doubles = _doubles(shards)
            raise ValueError(
                f"{self.folder}: {len(doubles)} shard(s) repeat rows of other shards: two runs wrote at the same time."
                f" Delete {', '.join(doubles)} and run the same command again: rows that are then missing"
                " are scored again."
            )
        return ExistingScores(rows, versions, settings, counts, len(names))

    def write(self, table: pyarrow.Table, header: Mapping[str, Any], rank: int) -> None:
        """Write a shard under a unique name, with the columns ``file`` and ``row`` among others.

        The header has ``settings``, ``files`` (their versions by name) and ``counts``.
        """
        content = json.dumps({"format": FORMAT, **header}).encode()
        sink = pyarrow.BufferOutputStream()
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _HEADER: content})
        pyarrow.parquet.write_table(table, sink, compression="zstd")
        name = f"part-{rank:05d}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}.parquet"
        self.folder.write(name, sink.getvalue())

    def schema(self, columns: Sequence[str] | None = None) -> pyarrow.Schema:
        """Return the columns of the shards, or those that are named; all shards of a folder have the same.

        Raises:
            ValueError: If the folder has no shard, or a column does not exist.
        """
        names = self.names()
        if not names:
            raise ValueError(f"'{self.folder}' has no scores: name a folder that `longce predict` wrote to.")
        with self._opened(names[0]) as file:
            schema = file.schema_arrow
        if unknown := sorted(set(columns or ()) - set(schema.names)):
            raise ValueError(f"The scores have no column {unknown[0]!r}, only {schema.names}.")
        return schema if columns is None else pyarrow.schema([schema.field(name) for name in columns])

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield some columns of all shards, a few thousand rows at a time; a ``ValueError`` if one is damaged."""
        for name in self.names():
            with self._opened(name) as file:
                yield from file.iter_batches(columns=list(columns), use_threads=False)

    def header(self) -> dict[str, Any]:
        """Return the header of the first shard; a ``ValueError`` if the folder has none."""
        self.schema()
        with self._opened(self.names()[0]) as file:
            return self._header(file, self.names()[0])

    def _read_rows(self, name: str) -> tuple[dict[str, Any], Rows]:
        with self._opened(name) as file:
            header = self._header(file, name)
            table = file.read(columns=["file", "row"], use_threads=False)
        codes = table["file"].combine_chunks().dictionary_encode()
        files, index = codes.dictionary.to_pylist(), codes.indices.to_numpy()
        order = np.argsort(index, kind="stable")
        starts = np.searchsorted(index[order], np.arange(len(files)))
        return header, dict(zip(files, np.split(table["row"].to_numpy()[order], starts[1:]), strict=True))

    def _header(self, file: pyarrow.parquet.ParquetFile, name: str) -> dict[str, Any]:
        header = json.loads((file.schema_arrow.metadata or {}).get(_HEADER, b"{}"))
        if header.get("format") != FORMAT:
            raise ValueError(f"'{self.folder}/{name}' does not hold document scores ({FORMAT}). Name another folder.")
        return header

    def _add_versions(self, versions: dict[str, str], own: Mapping[str, str]) -> None:
        for file, version in own.items():
            if versions.setdefault(file, version) != version:
                raise ValueError(f"{self.folder}: has rows of two versions of '{file}'. Start again in another folder.")

    @contextmanager
    def _opened(self, name: str) -> Iterator[pyarrow.parquet.ParquetFile]:
        try:
            stream: BinaryIO
            with self.folder.open(name) as stream:
                yield pyarrow.parquet.ParquetFile(stream)
        except (pyarrow.ArrowException, EOFError) as error:
            raise ValueError(
                f"'{self.folder}/{name}' is damaged ({error}). Delete it: its documents are then scored again."
            ) from error


def _doubles(shards: Mapping[str, Rows]) -> list[str]:
    """Return the shards with a row that an earlier one holds."""
    import pandas as pd  # for this error only

    parts = [
        pd.DataFrame({"shard": name, "file": file, "row": numbers})
        for name, rows in shards.items()
        for file, numbers in rows.items()
    ]
    table = pd.concat(parts)
    return list(table["shard"][table.duplicated(["file", "row"])].unique())


def check_settings(then: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise a ``ValueError`` that names the settings of scores in a folder or file that differ from those of now."""
    now = json.loads(json.dumps(now))  # as they are read: tuples become lists
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if names:
        told = "; ".join(f"`{name}` was {then.get(name)!r} and is {now.get(name)!r}" for name in names[:_NAMED])
        raise ValueError(f"The scores in '{place}' were made with other settings: {told}. Name another folder.")
