"""Write the keys or the documents that `longce corpus select` has chosen."""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pyarrow.parquet

from lightning_modules.utilities.files import atomic_file, plain
from lightning_modules.utilities.locks import exclusive

_TEXTS = 64  # in memory at a time
_ROWS = 1024  # that are Python objects at a time


def write_keys(path: Path, chosen: duckdb.DuckDBPyRelation) -> int:
    """Write one key per line, and return how many; warn about documents whose key is empty or has several lines."""
    keys = pyarrow.RecordBatchReader.from_stream(chosen.project("key, file, row"))
    written = 0
    left_out = []
    with exclusive(path), atomic_file(path) as stream:
        for document in _iterate_rows(keys):
            key = str(document["key"] or "")
            if key.strip() and len(key.splitlines()) == 1:
                stream.write(f"{key}\n".encode())
                written += 1
            else:
                left_out.append(f"row {document['row']} of '{document['file']}'")
    if left_out:
        warnings.warn(
            f"{len(left_out):,} selected document(s) are not in '{path}', because a key must be one line that is not"
            f" empty; the first is {left_out[0]}. Write .parquet or .jsonl instead.",
            stacklevel=2,
        )
    return written


def write_documents(
    path: Path, chosen: duckdb.DuckDBPyRelation, source: Mapping[str, Any], files: str | list[str] | None
) -> int:
    """Write the rows of the chosen documents, and return how many.

    Scores of `longce corpus score` get the ``text`` or ``token_ids`` of their documents, in the order of the files,
    which ``source`` names (`read_source`), or ``files`` if they have moved.

    Raises:
        ValueError: If a document is missing or has changed.
    """
    reader = pyarrow.RecordBatchReader.from_stream(chosen)
    schema = reader.schema
    batches: Iterable[pyarrow.RecordBatch] = reader
    if source:
        schema = schema.append(_content_field(source))
        batches = _add_texts(reader.read_all(), source, files)
    written = 0
    with exclusive(path), atomic_file(path) as stream:
        if path.suffix == ".jsonl":
            for row in _iterate_rows(batches):
                stream.write(json.dumps(plain(row)).encode() + b"\n")
                written += 1
            return written
        with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch)
                written += len(batch)
    return written


def _iterate_rows(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for start in range(0, len(batch), _ROWS):
            yield from batch.slice(start, _ROWS).to_pylist()


def _content_field(source: Mapping[str, Any]) -> pyarrow.Field:
    """Return the column of the documents."""
    if source["token_column"] is None:
        return pyarrow.field("text", pyarrow.string())
    return pyarrow.field("token_ids", pyarrow.list_(pyarrow.int64()))


def _add_texts(
    chosen: pyarrow.Table, source: Mapping[str, Any], files: str | list[str] | None
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the chosen rows with the text or token ids of each document, some at a time."""
    from datamodules.sources.corpus import CorpusColumns, read_documents  # these import torch

    places = {}  # of each document in the table
    rows: dict[str, list[int]] = {}  # of each file
    for place, (file, row) in enumerate(zip(chosen["file"].to_pylist(), chosen["row"].to_pylist(), strict=True)):
        places[file, row] = place
        rows.setdefault(file, []).append(row)
    paths = files or source["files"]
    columns = CorpusColumns(source["text_column"], source["key_column"], (), source["token_column"])
    try:
        documents = read_documents([paths] if isinstance(paths, str) else paths, columns, rows)
        yield from _join_texts(chosen, documents, places, _content_field(source))
    except FileNotFoundError as error:
        raise ValueError(
            f"{error} If the scored files have moved, or the paths are relative: set `--files`."
        ) from error


def _join_texts(
    chosen: pyarrow.Table,
    documents: Iterator[tuple[Any, Any]],
    places: Mapping[tuple[str, int], int],
    field: pyarrow.Field,
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of documents with their texts or token ids, which must be those that were scored."""
    from datamodules.sources.corpus import TOKEN_HASH  # these import torch
    from lightning_modules.scoring.token_scores import text_sha256

    is_text = field.name == "text"
    hashes = chosen["text_hash" if is_text else TOKEN_HASH]
    found = 0
    while True:
        part = list(islice(documents, _TEXTS))
        if not part:
            break
        taken = []
        texts = []
        for ref, text in part:
            place = places[ref.file, ref.row]
            identity = text_sha256(text) if is_text else ref.columns.get(TOKEN_HASH)
            if ref.error is not None or identity != hashes[place].as_py():
                raise ValueError(f"Row {ref.row} of '{ref.file}' is no longer the document that was scored.")
            taken.append(place)
            texts.append(text)
        found += len(part)
        with_text = chosen.take(taken).append_column(field, pyarrow.array(texts, field.type))
        yield from with_text.combine_chunks().to_batches()
    if found != len(chosen):
        raise ValueError(f"{len(chosen) - found} of the {len(chosen)} documents no longer exist.")
