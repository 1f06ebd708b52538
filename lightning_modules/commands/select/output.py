"""Write the keys or the documents that `longce select` has chosen."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from lightning_modules.commands.select.rows import NUMBER
from lightning_modules.utilities.files import atomic_file, plain, write_atomically

_WRITTEN_TOGETHER = 64  # documents
_MAX_NAMED, _MAX_EXCERPT = 3, 40  # documents named in a warning, and characters of the key of each


def write_keys(path: Path, chosen: pyarrow.Table) -> int:
    """Write one key per line, and return how many; warn about documents whose key is empty or has several lines."""
    lines = []
    left_out = []
    for document in chosen.to_pylist():
        key = document["key"] or ""
        if key.strip() and len(key.splitlines()) == 1:
            lines.append(f"{key}\n")
        else:
            left_out.append(f"row {document['row']} of '{document['file']}' ({key[:_MAX_EXCERPT]!r})")
    write_atomically(path, "".join(lines).encode())
    if left_out:
        others = " and others" if len(left_out) > _MAX_NAMED else ""
        warnings.warn(
            f"{len(left_out):,} selected document(s) are not in '{path}', because a key must be one line that is not"
            f" empty: {', '.join(left_out[:_MAX_NAMED])}{others}. Write .parquet or .jsonl instead.",
            stacklevel=2,
        )
    return len(lines)


def write_documents(path: Path, chosen: pyarrow.Table, header: Mapping[str, Any], files: str | list[str] | None) -> int:
    """Write the rows of the chosen documents, and return how many.

    Scores of `longce predict` get the ``text`` of their documents, in the order of the files. ``header`` is that of the
    scores (`ScoreRows.header`), and ``files`` are the files of the documents if they have moved.

    Raises:
        ValueError: If a document is missing or has changed.
    """
    chosen = chosen.sort_by([("file", "ascending"), ("row", "ascending")]).drop_columns([NUMBER]).combine_chunks()
    schema, batches = chosen.schema, iter([chosen])
    if "source" in header:
        source = {**header["source"], "files": files or header["source"]["files"]}
        schema = schema.append(pyarrow.field("text", pyarrow.string()))
        batches = _add_texts(chosen, source)
    with atomic_file(path) as stream, _open_writer(stream, path.suffix, schema) as write:
        for batch in batches:
            write(batch)
    return len(chosen)


def _add_texts(chosen: pyarrow.Table, source: Mapping[str, Any]) -> Iterator[pyarrow.Table]:
    """Yield the chosen rows with the text of each document, some at a time."""
    from datamodules.sources.corpus import CorpusColumns, read_documents  # these import torch
    from lightning_modules.scoring.token_scores import text_sha256

    places = {}  # of each document in the table
    rows: dict[str, list[int]] = {}  # of each file
    for place, (file, row) in enumerate(zip(chosen["file"].to_pylist(), chosen["row"].to_pylist(), strict=True)):
        places[file, row] = place
        rows.setdefault(file, []).append(row)
    hashes = chosen["text_hash"]
    columns = CorpusColumns(source["text_column"], source["key_column"], ())
    documents = read_documents(source["files"], columns, rows)
    found = 0
    while part := list(islice(documents, _WRITTEN_TOGETHER)):
        taken, texts = [], []
        for ref, text in part:
            place = places[ref.file, ref.row]
            if ref.error is not None or text_sha256(text) != hashes[place].as_py():
                raise ValueError(f"Row {ref.row} of '{ref.file}' is no longer the document that was scored.")
            taken.append(place)
            texts.append(text)
        found += len(part)
        yield chosen.take(taken).append_column("text", pyarrow.array(texts, pyarrow.string()))
    if found != len(chosen):
        raise ValueError(f"{len(chosen) - found} of the {len(chosen)} documents no longer exist.")


@contextmanager
def _open_writer(stream: BinaryIO, ending: str, schema: pyarrow.Schema) -> Iterator[Callable[[pyarrow.Table], None]]:
    """Yield a function that appends rows to a parquet or JSON-lines file."""
    if ending == ".parquet":
        with pyarrow.parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
            yield writer.write_table
    else:
        yield lambda table: stream.writelines(json.dumps(plain(row)).encode() + b"\n" for row in table.to_pylist())
