"""Read records of JSON-lines, parquet and compressed files with bounded memory."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, cast

from datamodules.sources.locations import PARQUET, File

# UTF-8, without the byte-order mark that some editors add.
ENCODING = "utf-8-sig"

MAX_DOCUMENT = 1 << 28
"""Maximum bytes of a document, uncompressed: a hundred long books. A few kilobytes can expand beyond all memory."""

_TO_LINES = (
    " If the file is a JSON array, or has objects of several lines, convert it:"
    " `jq -c 'if type == \"array\" then .[] else . end' FILE.json > FILE.jsonl`"
)

Parse = Callable[[], dict[str, Any]]


def read_records(
    file: File,
    columns: Sequence[str],
    wanted: Callable[[int], bool] = lambda row: True,
    *,
    text_columns: Sequence[str] = (),
    row_group: int | None = None,
    first: int = 0,
) -> Iterator[tuple[int, Parse]]:
    """Yield the number of each wanted record, and a function that parses it or raises a ``ValueError``.

    Parquet files need one of the text columns; only these columns are read, and only one row group if given. `first` is
    the number of the first record.
    """
    with opened(file) as stream:
        if file.name.endswith(PARQUET):
            from datamodules.sources.parquet import parquet_rows  # imports pyarrow, which text does not need

            yield from parquet_rows(stream, file, columns, wanted, text_columns, row_group, first)
            return
        for row, line in enumerate(lines_of(stream), first):
            if wanted(row) and (len(line) > MAX_DOCUMENT or not line.isspace()):
                yield row, partial(parsed_line, line, f"{file}:{row}")


def nested(record: Any, path: str) -> Any:
    """Return the value at a dotted path such as ``"meta.pile_set_name"``, or of a field of this name, or ``None``."""
    if isinstance(record, Mapping) and path in record:
        return record[path]
    for key in path.split("."):
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def is_packed(file: File) -> bool:
    """Return whether a file is compressed."""
    return file.suffix in (".gz", ".zst")


@contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    """Open a file that is downloaded and decompressed as it is read; raise a ``ValueError`` if it is damaged."""
    with file.open("rb") as stream:
        if not is_packed(file):
            yield stream
            return
        import pyarrow

        kind = "gzip" if file.suffix == ".gz" else "zstd"
        try:
            with io.BufferedReader(pyarrow.CompressedInputStream(stream, kind)) as unpacked:
                yield cast(BinaryIO, unpacked)
        except OSError as error:
            raise ValueError(f"{file}: the compressed file is damaged ({error}). Download it again.") from error


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines, and only the beginning of a line that is too long."""
    line = stream.readline(MAX_DOCUMENT + 1)
    while line:
        yield line
        while len(line) > MAX_DOCUMENT and not line.endswith(b"\n"):  # skip the rest
            line = stream.readline(MAX_DOCUMENT + 1)
        line = stream.readline(MAX_DOCUMENT + 1)


def read_document(file: File) -> bytes:
    """Read a file that is one document, or only its beginning if it is too large."""
    with opened(file) as stream:
        return stream.read(MAX_DOCUMENT + 1)


def decoded(content: bytes, place: str) -> str:
    """Decode UTF-8; raise a ``ValueError`` that names the place if that fails or the document is too large."""
    if len(content) > MAX_DOCUMENT:
        raise ValueError(
            f"{place}: the document exceeds {MAX_DOCUMENT:,} bytes. Split it, or remove it if it is not text."
        )
    try:
        return content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start} is not UTF-8 ({error.reason})."
            " Convert the file to UTF-8, or remove the document."
        ) from error


def parsed_line(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line of JSON lines; raise a ``ValueError`` that names the place if it is not an object."""
    text = decoded(line, place)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # also for thousands of digits or brackets
        remedy = "Each line must be one complete JSON object."
        if isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip()):  # the value does not end here
            remedy += _TO_LINES
        raise ValueError(f"{place}: malformed JSON ({error}). {remedy}") from error
    if not isinstance(record, dict):
        remedy = "Each line must be one JSON object."
        if isinstance(record, list):
            remedy += _TO_LINES
        raise ValueError(f"{place}: expected a JSON object, got {type(record).__name__}. {remedy}")
    return record
