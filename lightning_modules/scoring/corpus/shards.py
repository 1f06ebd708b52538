"""Parquet files with scores of documents: each is written by one process, and read again to resume."""

import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from lightning_modules.scoring.corpus.output_folder import OutputFolder

FORMAT = "longce-document-scores-1"
SUCCESS = "_SUCCESS.json"
"""File with total counts, written when all documents are scored."""

PER_TOKEN = ("lsd", "lcl", "token_starts", "token_ends")
"""Columns with a list of one value per token."""

_REPEAT = (
    "Delete shards that do not belong there, and run the same `longce predict` again: it scores the missing documents."
)
HEADER = b"longce"
"""Key of the header in the metadata of a shard."""
_READER_THREADS = 16  # reading thousands of small remote files is mostly waiting
_MAX_SETTINGS = 5  # in a message

Rows = dict[str, NDArray[np.int64]]
"""Ascending row indices, by file name."""


class ExistingScores(NamedTuple):
    """Content of a folder of shards."""

    rows: Rows  # scored rows of each file
    versions: dict[str, str]  # content hashes of these files when their rows were scored
    settings: dict[str, Any]  # settings of the scores; empty without shards
    counts: dict[str, int]  # sums of the shards' counts: documents, failed documents, tokens, ..
    shards: int  # number of shards


class ScoreShards:
    """A local folder or fsspec URL of ``part-*.parquet`` files, whose metadata records the settings of their scores."""

    def __init__(self, path: str) -> None:
        self.folder = OutputFolder(path)

    def names(self) -> list[str]:
        """Return the names of the shards, in order."""
        return self.folder.names(".parquet")

    def existing_scores(self) -> ExistingScores:
        """Read which rows have scores."""
        versions: dict[str, str] = {}
        settings: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        tables, names = [], self.names()
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            for name, (header, table) in zip(names, pool.map(self._read_rows, names), strict=True):
                check_settings(header["settings"], settings or header["settings"], f"{self.folder}/{name}")
                settings = header["settings"]
                for file, version in header["files"].items():
                    if versions.setdefault(file, version) != version:
                        raise ValueError(
                            f"{self.folder} has rows of two versions of '{file}'. Start again in another folder."
                        )
                counts.update(header["counts"])
                tables.append(table)
        if not tables:
            return ExistingScores({}, {}, {}, {}, 0)
        # Sort all rows by file and number; of equal ones, those of earlier shards come first.
        scored = pyarrow.concat_tables(tables)
        files = scored["file"].combine_chunks().dictionary_encode()
        index, numbers = files.indices.to_numpy(), scored["row"].to_numpy()
        order = np.lexsort((numbers, index))
        index, numbers = index[order], numbers[order]
        repeated = (np.diff(index) == 0) & (np.diff(numbers) == 0)
        if repeated.any():
            shard = np.repeat(names, [len(table) for table in tables])[order]
            repeating = np.unique(shard[1:][repeated])
            raise ValueError(
                f"{self.folder}: {len(repeating)} shard(s) repeat rows of other shards, because two runs wrote at the"
                f" same time. Delete {', '.join(repeating)} and run the same command again: missing rows are scored"
                " again."
            )
        starts = np.searchsorted(index, np.arange(len(files.dictionary)))
        rows = dict(zip(files.dictionary.to_pylist(), np.split(numbers, starts[1:]), strict=True))
        return ExistingScores(rows, versions, settings, dict(counts), len(names))

    def write(self, table: pyarrow.Table, header: Mapping[str, Any], rank: int) -> None:
        """Write a shard with a unique name; its columns must include ``file`` and ``row``.

        The header has ``settings``, ``files`` (their content hashes by name) and ``counts``.
        """
        content = json.dumps({"format": FORMAT, **header}).encode()
        sink = pyarrow.BufferOutputStream()
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), HEADER: content})
        pyarrow.parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
        name = f"part-{rank:05d}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}.parquet"
        self.folder.write(name, sink.getvalue())

    def write_success(self, content: Mapping[str, Any]) -> None:
        """Write ``_SUCCESS.json`` with the content, and with what identifies each shard."""
        listed = self._identify(self.names())
        text = json.dumps({**content, "contents": listed}, indent=2) + "\n"
        self.folder.write(SUCCESS, text.encode())

    def check_success(self) -> bool:
        """Compare the shards with ``_SUCCESS.json``; return whether it exists.

        Raises:
            ValueError: If a shard is missing, is not listed, or has other content.
        """
        try:
            with self.folder.open(SUCCESS) as stream:
                listed = json.load(stream)["contents"]
        except FileNotFoundError:
            return False
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"'{self.folder}/{SUCCESS}' is damaged ({error!r}). {_REPEAT}") from error
        names = self.names()
        there = self._identify([name for name in names if name in listed])
        missing, changed = listed.keys() - there.keys(), [name for name in there if there[name] != listed[name]]
        problems = [f"{name} ({listed[name]['rows']:,} documents) is missing" for name in sorted(missing)]
        problems += [f"{name} is not listed in {SUCCESS}" for name in names if name not in listed]
        problems += [f"{name} has other content" for name in changed]
        if problems:
            raise ValueError(f"'{self.folder}' has changed: {'; '.join(problems[:_MAX_SETTINGS])}. {_REPEAT}")
        return True

    def _identify(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return rows, bytes and the SHA-256 of the footer of shards, by name; None instead of rows if one is damaged.

        The footer has the size and the statistics of each part of a shard, and each page has a checksum, so that
        nobody needs to read terabytes to notice another file.
        """
        with ThreadPoolExecutor(_READER_THREADS) as pool:
            return dict(zip(names, pool.map(self._identify_shard, names), strict=True))

    def _identify_shard(self, name: str) -> dict[str, Any]:
        with self.folder.open(name) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - 8))
            length = int.from_bytes(stream.read(8)[:4], "little")  # of the footer, which ends with it and a mark
            stream.seek(max(0, size - 8 - length))
            footer = hashlib.sha256(stream.read()).hexdigest()
            try:
                rows = pyarrow.parquet.ParquetFile(stream).metadata.num_rows
            except (pyarrow.ArrowException, EOFError, OSError):
                rows = None
            return {"rows": rows, "bytes": size, "footer_sha256": footer}

    def schema(self, columns: Sequence[str] | None = None) -> pyarrow.Schema:
        """Return the schema of the shards, or of some of their columns; all shards of a folder have the same."""
        names = self.names()
        if not names:
            raise ValueError(f"'{self.folder}' contains no scores: give a folder that `longce predict` has written.")
        with self._open_shard(names[0]) as file:
            schema = file.schema_arrow
        if unknown := sorted(set(columns or ()) - set(schema.names)):
            raise ValueError(f"The scores have no column {unknown[0]!r}, only {schema.names}.")
        return schema if columns is None else pyarrow.schema([schema.field(name) for name in columns])

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield some columns of all shards, a few thousand rows at a time; raise a ``ValueError`` for a damaged one."""
        for name in self.names():
            with self._open_shard(name) as file:
                yield from file.iter_batches(columns=list(columns), use_threads=False)

    def table(self, columns: Sequence[str]) -> pyarrow.Table:
        """Read some columns of all shards."""
        batches = (batch.replace_schema_metadata() for batch in self.batches(columns))
        return pyarrow.Table.from_batches(batches, self.schema(columns).remove_metadata())

    def header(self) -> dict[str, Any]:
        """Return the header of the first shard; raise a ``ValueError`` for a folder without shards."""
        self.schema()
        with self._open_shard(self.names()[0]) as file:
            return self._read_header(file, self.names()[0])

    def _read_rows(self, name: str) -> tuple[dict[str, Any], pyarrow.Table]:
        with self._open_shard(name) as file:
            return self._read_header(file, name), file.read(columns=["file", "row"], use_threads=False)

    def _read_header(self, file: pyarrow.parquet.ParquetFile, name: str) -> dict[str, Any]:
        header = json.loads((file.schema_arrow.metadata or {}).get(HEADER, b"{}"))
        if header.get("format") != FORMAT:
            raise ValueError(f"'{self.folder}/{name}' does not contain document scores ({FORMAT}). Use another folder.")
        return header

    @contextmanager
    def _open_shard(self, name: str) -> Iterator[pyarrow.parquet.ParquetFile]:
        try:
            stream: BinaryIO
            with self.folder.open(name) as stream:
                yield pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
        except (pyarrow.ArrowException, EOFError) as error:
            raise ValueError(
                f"'{self.folder}/{name}' is damaged ({error}). Delete it: its documents are then scored again."
            ) from error


def check_settings(then: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise a ``ValueError`` if existing scores (``place``) were computed with other settings."""
    current = json.loads(json.dumps(now))  # tuples become lists, as in the file
    names = sorted(name for name in {*then, *current} if then.get(name) != current.get(name))
    if names:
        changes = "; ".join(
            f"`{name}` was {then.get(name)!r} and is {current.get(name)!r}" for name in names[:_MAX_SETTINGS]
        )
        raise ValueError(f"The scores in '{place}' were made with other settings: {changes}. Use another folder.")


class ReadProgress(NamedTuple):
    """Progress of a process in a corpus."""

    documents: int  # number of documents so far, including failed ones
    complete: bool  # whether these are all of its documents
    unreadable: list[str]  # files, or parts of files, that could not be read, with the reason
